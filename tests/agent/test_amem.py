"""A-MEM's notes: read from whatever a model says, linked, revised, found again by vectors made by hand; then runs."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_agent import Letters, tasks
from train import command
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from memopd.agent import Agent, Observation, Outcome
from memopd.agent.amem import NOTE, AMem, Note, evolve, read_note
from memopd.agent.codec import codec_of
from memopd.agent.memory import MINILM, Mem1, Reply, Turn, memory_rule, named_rule
from memopd.compile import fill
from memopd.engine import Completion
from memopd.engine.local import LocalEngine
from memopd.evaluate import measure
from memopd.record import read_episodes
from memopd.retrieval import dense
from memopd.train.traces import read_traces
from memopd.types import Sampling, StopReason
from memopd.verify.equivalence import equivalence
from memopd.verify.families import tiny_model
from memopd.world.demonstrations import write_world
from memopd.world.encyclopedia import Difficulty

ROOT = Path(__file__).parent.parent.parent
STUDENT = ROOT / "models" / "student"
CODEC = codec_of(Letters())
NONE = np.zeros(0, np.int32)


def words(texts):
    """A vector of length 1 per text: how often it has each word, at a place that the word's hash gives."""
    rows = np.zeros((len(texts), 64))
    for row, text in zip(rows, texts, strict=True):
        for word in text.lower().split():
            row[hashlib.blake2b(word.strip(".,:;()<>/").encode()).digest()[0] % 64] += 1
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def amem(size=2, embed=words):
    return AMem(CODEC, Letters(), size, embed)


def reply(text, purpose="note", call=1):
    return Reply(NONE, text, purpose, call)


# ---- what a model wrote

WRITTEN = Note("The Velm is 90 km long.", 1, ("Velm", "length"), ("river",), "To compare lengths")


@pytest.mark.parametrize(
    "text",
    [
        "Content: The Velm is 90 km long.\nKeywords: Velm, length\nTags: river\nContext: To compare lengths",
        "**Content:** The Velm is\n  90 km long.\n\n**Keywords:**\n* Velm\n* length\n\n**Tags:** river\n\n"
        "- Context: To compare lengths",
        '{"content": "The Velm is 90 km long.", "keywords": ["Velm", "length"], "tags": ["river"], '
        '"context": "To compare lengths"}',
        '```json\n{\n  "Content": "The Velm is 90 km long.",\n  "Keywords": ["Velm", "length", "Velm"],\n'
        '  "Tags": ["river"],\n  "Context": "To compare lengths"\n}\n```',
        "Sure! Here it is.\ntags: river\nCONTENT : The Velm is 90 km long.\nkeywords: Velm; length.\n"
        "context: To compare lengths\nContent: another note, which is not asked for",
    ],
)
def test_a_note_in_the_forms_that_models_choose(text):
    assert read_note(reply(text)) == WRITTEN


@pytest.mark.parametrize(
    "text",
    ["The Velm is 90 km long.", "Keywords: Velm\n Tags:", "Content:\nKeywords: a", '{"content": ', "The tags: [["],
)
def test_a_reply_without_a_content_is_all_content(text):
    assert read_note(reply(text)) == Note(" ".join(text.split()), 1)


def test_an_empty_reply_is_no_note():
    assert read_note(reply(" \n ")) is None


NOTES = [Note("a", 1), Note("b", 3, tags=("old",)), Note("c", 6, context="old"), Note("new", 9)]


@pytest.mark.parametrize(
    "text",
    [
        "Links: 1, 3\nNote 3 tags: x, y\nNote 3 context: now",
        "- **Links**: [1], [3], [2], [4], [77]\n- **Note 3**:\n  - New tags: x, y.\n  - context: now\nNote 2 tags: z",
        "Link to older notes: note 1 and note 3\nNote 3: tags: x; y\nnote 3 Context: now\nNote 99 context: far",
    ],
)
def test_evolve_links_both_ways_and_changes_only_what_was_shown(text):
    a, b, c, new = evolve(NOTES, [2, 0], text)
    assert (a.links, b, new.links) == ({3}, NOTES[1], {0, 2})
    assert c == Note("c", 6, tags=("x", "y"), context="now", links=frozenset({3}))


def test_evolve_may_revise_the_new_note_but_not_a_content():
    assert evolve(NOTES, [0], "Note 4 tags: fresh\nNote 1 content: forged")[3] == replace(NOTES[3], tags=("fresh",))
    assert evolve(NOTES, [0], "Note 1 content: forged\nLinks: none\nNote 1 tags:\nNothing.") == NOTES


MARKS = st.sampled_from(
    ["content", "Keywords", "tags", "context", "Links", "Note", ":", "\n", ",", '"', "{", "**", "1", "9"]
)


@given(st.one_of(st.text(), st.lists(st.one_of(MARKS, st.text(max_size=4)), max_size=20).map(" ".join)))
def test_no_reply_is_an_exception(text):
    note = read_note(reply(text))
    assert (note is None) == (not text.split())
    evolved = evolve(NOTES, [0, 2], text)
    assert evolved[1] == NOTES[1]
    assert [n.content for n in evolved] == ["a", "b", "c", "new"]
    assert all(other < 4 and place in evolved[other].links for place, n in enumerate(evolved) for other in n.links)


# ---- which notes come back

AT = {"q": (1, 0), "n0": (0, 1), "n1": (0.6, 0.8), "n2": (0.8, 0.6), "n3": (0.6, 0.8), "n4": (-1, 0)}


@pytest.mark.parametrize(
    ("size", "links", "expected"),
    [
        (1, {}, [2]),
        (2, {}, [2, 3]),  # of two that are as near, the newer
        (9, {}, [2, 3, 1, 0, 4]),
        (1, {2: {0, 4}}, [2, 0]),  # as many linked ones at most: the nearer of them
        (2, {2: {0, 4}, 3: {1}}, [2, 3, 1, 0]),
        (2, {1: {4}}, [2, 3]),  # links of a note that is not near
        (2, {2: {3}}, [2, 3]),
    ],
)
def test_the_nearest_then_those_linked_to_them(size, links, expected):
    notes = [Note(f"n{i}", i, links=frozenset(links.get(i, ()))) for i in range(5)]
    assert amem(size, lambda texts: np.array([AT[t] for t in texts])).related(notes, "q") == expected


def test_a_revised_note_has_another_vector():
    """The embedded text holds all fields, so a context that was rewritten is found by its new words."""
    notes = [Note("one", 1), Note("two", 2)]
    assert amem(1).related(notes, "tide") == [1]
    assert amem(1).related(evolve([*notes, Note("three", 3)], [0], "Note 1 context: tide")[:2], "tide") == [0]


# ---- through the agent


class World:
    """As many searches as the task has questions; each finds a document about its own number."""

    def start(self, task):
        return Observation(task.id)

    def step(self, live):
        n = [len(p.responses) for p in live]
        return [Observation(f"<doc {i}>" if i < p.task.k else None) for i, p in zip(n, live, strict=True)]

    def grade(self, task, responses):
        return Outcome(1.0)


class Script:
    """Acts with the number of the turn, and takes notes as told. Remembers what it was asked."""

    def __init__(self, *evolutions):
        self.evolutions, self.asked = iter(evolutions), []

    def generate(self, requests):
        return [self._completion(r) for r in requests]

    def _completion(self, request):
        prompt = "".join(map(chr, request.prompt))
        self.asked.append((request.purpose, prompt))
        turn = sum(not purpose for purpose, _ in self.asked) - 1
        said = f"(act {turn})"
        if request.purpose == "note":
            said = f"Content: fact {turn - 1}\nKeywords: doc {turn}"
        elif request.purpose == "evolve":
            said = next(self.evolutions, "nothing")
        return Completion(np.array([ord(c) for c in said], np.int32), None, StopReason.STOP)


def play(engine, memory=None, turns=4, max_context=4096):
    [episode] = Agent(engine, World(), memory or amem(), Letters(), Sampling(), max_context=max_context).play(
        tasks(turns)
    )
    return episode


def said(ids):
    return "".join(map(chr, ids))


def test_every_turn_but_the_last_is_noted_before_it_leaves_the_context():
    engine = Script("Links: 1\nNote 1 tags: first")
    episode = play(engine)
    assert [c.purpose for c in episode.calls] == ["", "", "note", "", "note", "evolve", ""]
    assert all(c.trainable for c in episode.calls)
    prompts = [said(c.prompt) for c in episode.calls]
    assert prompts[1] == "[t0](act 0)<doc 1>"  # turn 0 is still there whole: as under mem1
    assert prompts[2].startswith("[(act 0)<doc 1>\nAbove is one step of a search.")
    assert prompts[3] == "[t0]<notes>\nNote 1: fact 0 Keywords: doc 1.\n</notes>\n(act 1)<doc 2>"
    assert prompts[4].startswith("[(act 1)<doc 2>\nAbove")
    assert prompts[5].startswith(
        "[Note 1: fact 0 Keywords: doc 1.\nNote 2: fact 1 Keywords: doc 2.\n\nNote 2 is new. Which of"
    )
    assert prompts[6] == (
        "[t0]<notes>\nNote 2: fact 1 Keywords: doc 2.\n"
        "Note 1: fact 0 Keywords: doc 1. Tags: first.\n</notes>\n(act 2)<doc 3>"
    )
    assert [(s.kind, s.source) for s in episode.calls[6].segments] == [
        ("prefix", None), ("memory", 4), ("memory", 2), ("memory", 3), ("observation", 3),
    ]  # fmt: skip
    assert episode.calls[2].completion.tolist() == [ord(c) for c in "Content: fact 0\nKeywords: doc 1"]


def test_the_agents_own_calls_see_its_turns_as_under_mem1():
    noting, plain = play(Script()), play(Script(), Mem1())
    assert [c.completion.tolist() for c in noting.actions] == [c.completion.tolist() for c in plain.calls]
    for ours, theirs in zip(noting.actions, plain.calls, strict=True):
        assert said(ours.prompt).partition("<notes>")[0] in said(theirs.prompt)
        assert said(ours.prompt).rpartition("</notes>\n")[2] in said(theirs.prompt)


def test_there_is_no_state_besides_the_replies():
    """A rule made anew for every update, and one that other episodes used before, say the same."""

    class Anew:
        def context(self, turns):
            return amem(4).context(turns)

    evolutions = "Links: 1\nNote 1 context: a", "Note 2 tags: b\nNote 3 tags: c", "Links: 2, 3"
    used = amem(4)
    list(play(Script("Note 1 context: other"), used, turns=6).calls)
    played = [play(Script(*evolutions), memory, turns=6) for memory in (used, Anew(), amem(4))]
    assert played[0].calls == played[1].calls == played[2].calls
    assert "Context: a." in said(played[0].calls[-1].prompt)


def test_an_empty_note_is_left_out():
    class Silent(Script):
        def _completion(self, request):
            done = super()._completion(request)
            return replace(done, tokens=np.array([32], np.int32)) if request.purpose == "note" else done

    episode = play(Silent())
    assert [c.purpose for c in episode.calls] == ["", "", "note", "", "note", ""]
    assert not any("<notes>" in said(c.prompt) for c in episode.calls)


def test_what_does_not_fit_is_left_out_from_the_least_near():
    """Two notes of 37 and 49 letters around 20 of the turn and 4 of q, less and less room for them."""
    whole = play(Script("Links: 1\nNote 1 tags: first"))
    length = len(whole.calls[-1].prompt)
    pieces = {s.source: s.stop - s.start for s in whole.calls[-1].segments if s.kind == "memory"}
    turns = [
        Turn(c.completion, CODEC.encode(f"<doc {i + 1}>"), call)
        for i, (call, c) in enumerate((n, c) for n, c in enumerate(whole.calls) if not c.purpose)
    ][:3]
    replies = [(), (reply(said(whole.calls[2].completion), "note", 2),)]

    def context(room):
        given = [replace(t, replies=r, room=room) for t, r in zip(turns, [*replies, ()], strict=True)]
        update = amem()._pieces([*amem().notes(given), Note("fact 1", 4, ("doc 2",))], given)
        return [p.source for p in update]

    assert context(None) == context(length - 4) == [4, 2, 3, 3]
    assert context(pieces[4] + 30) == [4, 3, 3]
    assert context(25) == [3, 3]
    assert context(1) == [3, 3]  # then the agent ends the episode, as under mem1


@pytest.mark.parametrize("max_context", [22, 23, 60, 90, 120, 440, 460, 480, 500, 550, 600, 700])
def test_every_prompt_fits(max_context):
    """Under mem1 the actions need 22 tokens: whatever is left is for notes, and no episode ends for them."""
    episode = play(Script(*["Links: 1, 2, 3\nNote 1 context: " + "x" * 60] * 9), turns=7, max_context=max_context)
    assert all(len(c.prompt) < max_context for c in episode.calls)
    assert len(episode.actions) == len(play(Script(), Mem1(), 7, max_context).calls)
    request = len(f"[{NOTE.format(step='')}]")
    assert any(c.purpose for c in episode.calls) == (max_context > len("[t0]") + request)


def test_a_rule_that_does_not_know_its_room_does_not_fit():
    """The check above can fail."""

    class Roomy:
        def context(self, turns):
            return amem().context([replace(turn, room=None) for turn in turns])

    with pytest.raises(ValueError, match="the memory rule's prompt for 'note' has"):
        play(Script(), Roomy(), max_context=300)


def test_notes_cost_dependency():
    """Σ |a| · (|z| + ⌊|a| / 2⌋) over all calls, of which turns and peak count actions only."""
    episode = play(Script())
    measured = measure(episode, tasks(4)[0], said)
    costs = [len(c.completion) * (len(c.prompt) + len(c.completion) // 2) for c in episode.calls]
    assert measured.dependency == sum(costs)
    assert (measured.calls, measured.peak) == (4, max(len(c.prompt) + len(c.completion) for c in episode.actions))


def test_packed_is_what_the_calls_alone_are():
    model = tiny_model("qwen2").double()
    model.generation_config.eos_token_id = None
    engine = LocalEngine(model, None, slots=4, max_length=512)
    agent = Agent(engine, World(), amem(), Letters(), Sampling(max_tokens=6), max_context=506)
    calls = [c for e in agent.play(tasks(4, 3)) for c in e.calls]
    assert {c.purpose for c in calls} == {"", "note", "evolve"}
    report = equivalence(model, calls)
    assert report.passed
    assert report.rows < report.tokens
    assert report.decisions == sum(len(c.completion) for c in calls)  # of the notes too: all are trained
    broken = fill(calls, 8192)
    broken[0].positions[-1] += 1
    assert not equivalence(model, calls, packs=broken).passed


# ---- by its name


def test_names():
    assert named_rule("memory", "amem")[1] == {}
    assert named_rule("memory", "amem:5")[1] == {"size": 5}
    assert named_rule("memory", "amem:./minilm")[1] == {"embedder": "./minilm"}
    assert named_rule("memory", "amem:5:org/model")[1] == {"size": 5, "embedder": "org/model"}
    for name, line in (
        ("amem:0", "the size of a memory rule is 1 or more, as in amem:3, got 'amem:0'"),
        ("window:3:x", "No module named 'window'"),
        ("amem", "memory: 'amem' needs tokenizer; available: codec"),
    ):
        with pytest.raises(ValueError, match=line):
            memory_rule(name, CODEC)


def test_a_missing_package_or_model_is_one_line(monkeypatch):
    for model in (MINILM, "./nowhere"):  # no test has a network
        with pytest.raises(ValueError, match=rf"^{model}: [^\n]+$"):
            dense.embedder(model)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"^m: embeddings need sentence_transformers: pip install 'memopd\[dense\]'$"):
        dense.embedder("m")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A world, and a tiny encoder for it: random weights, a token per letter."""
    folder = tmp_path_factory.mktemp("amem")
    write_world(folder / "world", 400, 0, Difficulty(), 0, lambda _, items: items)
    letters = [chr(i) for i in range(33, 127)]
    (folder / "encoder").mkdir()
    vocabulary = folder / "encoder" / "vocab.txt"
    vocabulary.write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)])
    )
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder / "encoder")
    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=5 + 2 * len(letters), **small)).save_pretrained(folder / "encoder")
    return folder


def test_rollout_and_evaluate(world, tmp_path, call_main):
    """With the shipped student and with the oracle, whose notes do not get into its way."""
    rule = ["--memory", f"amem:2:{world / 'encoder'}", "--index", world / "world/index", "--limit", 2]
    file, sizes = world / "world/tasks/dev-q2.parquet", ["--max-tokens", 48, "--max-context", 1024]
    code, _, error = call_main("rollout", file, *rule, *sizes, "--model", STUDENT, "-o", tmp_path / "e")
    assert code == 0, error
    episodes = list(read_episodes(tmp_path / "e"))
    assert {"", "note", "evolve"} == {c.purpose for e in episodes for c in e.calls}
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    reads = [tokenizer.decode(c.prompt) for e in episodes for c in e.actions[2:]]
    assert all("<notes>\nNote " in read for read in reads)
    code, out, error = call_main(
        "evaluate", file, *rule, "--policy", "oracle", "--tokenizer", world / "world/tokenizer", "--json"
    )  # fmt: skip
    assert code == 0, error
    assert json.loads(out)["results"][0]["metrics"]["em"]["mean"] == 2.0


@pytest.mark.slow  # tests/examples trains another memory that writes notes
def test_two_updates_learn_from_the_notes(world, tmp_path):
    """The run checks its first batch: packed = alone. The gradient that the tokens of a note alone give is not 0."""
    ended = command.memopd(
        "train", ROOT / "configs/quickstart.toml", "--output", tmp_path / "run", "--teacher.state", "none",
        "--model.student", STUDENT, "--tasks.memory", f"amem:2:{world / 'encoder'}",
        "--tasks.train", world / "world/tasks/train-q2.parquet", "--tasks.index", world / "world/index",
        "--optimise.steps", 2, "--optimise.tasks", 2, "--optimise.samples", 2, "--sampling.max_tokens", 48,
        environment={"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert ended.code == 0, ended.err
    calls = {
        (e.id, n): call
        for file in sorted((tmp_path / "run" / "episodes").glob("step-*.parquet"))
        for e in read_episodes(file)
        for n, call in enumerate(e.calls)
        if call.purpose
    }
    assert {c.purpose for c in calls.values()} == {"note", "evolve"}
    files = (tmp_path / "run" / "traces").glob("step-*.parquet")
    traces = {(t.episode, t.call): t for file in files for t in read_traces(file).values()}
    key = next(key for key, call in calls.items() if key in traces and traces[key].advantage.any())
    model = AutoModelForCausalLM.from_pretrained(STUDENT)
    ids = torch.tensor(np.concatenate([calls[key].prompt, calls[key].completion]))[None].long()
    size = len(calls[key].completion)
    logp = model(ids).logits[0, -size - 1 : -1].log_softmax(-1).gather(1, ids[0, -size:, None])[:, 0]
    (-logp * torch.tensor(traces[key].advantage)).sum().backward()
    assert sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None) > 0


REAL = Path(os.environ.get("MEMOPD_MINILM", "/no/such/folder"))


@pytest.mark.skipif(not REAL.is_dir(), reason="needs all-MiniLM-L6-v2: name its folder in MEMOPD_MINILM")
def test_minilm_finds_notes_by_what_they_mean():
    rule = AMem(CODEC, Letters(), 1, str(REAL))
    notes = [
        Note("The Velm flows into the sea at Tarn.", 1, ("Velm",), ("river",)),
        Note("Oskel painted the hall of the academy.", 2, ("Oskel",), ("artist",)),
        Note("The brook Lun is 12 km long.", 3, ("Lun",), ("river",)),
    ]
    assert rule.related(notes, "<search>who made the pictures at the school</search>") == [1]
    assert rule.related(notes, "<search>length of the stream</search>") == [2]
    linked = evolve(notes, [0, 1], "Links: 1")
    assert rule.related(linked, "<search>length of the stream</search>") == [2, 0]
