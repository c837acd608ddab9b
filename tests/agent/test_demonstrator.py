"""Demonstrations on questions with gold passages, through the real index, agent and tokenizer."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memopd.agent import Ask, Piece
from memopd.agent.codec import codec_of
from memopd.agent.demonstrator import (
    NO_ROOM,
    NOT_FOUND,
    NOT_GRADED,
    NOT_NAMED,
    NOT_SAID,
    clause,
    contains,
    demonstrate,
    keywords,
)
from memopd.agent.memory import Mem1
from memopd.agent.protocol import documents_of
from memopd.cli import app
from memopd.config import TasksConfig
from memopd.models.load import load_tokenizer
from memopd.record import read_episodes
from memopd.retrieval import Passage, build_index, open_index, write_corpus
from memopd.tasks import Question
from memopd.train.sft import load_examples

TOKENIZER = str(Path(__file__).parents[2] / "models" / "student")
PASSAGES = [
    Passage("kiss", "Kiss and Tell (1945 film)", "A comedy of 1945. It stars Shirley Temple as Corliss Archer."),
    Passage(
        "temple", "Shirley Temple", "She was an actress. As an adult she was Chief of Protocol, and an ambassador."
    ),
    Passage("velm", "Velm", "The Velm is a river of 90 km. It rises in Tarn."),
    Passage("oder", "Oder", "The Oder is a river of 840 km. It rises in Moravia."),
    Passage("clock", "Clock", "A clock measures time. Tarin Oskel built clocks."),
    *(Passage(f"x{i}", f"Thing {i}", f"A thing of no use, number {i}, made of wood.") for i in range(20)),
]
ONE = Question("velm", "Where does the river Velm rise?", ("the Tarn", "Tarn"), supporting=("velm",))
TWO = Question(
    "kiss",
    "Which position did the star of Kiss and Tell, Corliss Archer's film, hold?",
    ("Chief of Protocol",),
    supporting=("temple", "kiss"),
)
LONGER = Question("longer", "Which river is longer, the Velm or the Oder?", ("Oder",), supporting=("velm", "oder"))
BARE = Question("bare", "Who built clocks?", ("Tarin Oskel",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passages")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    build_index(folder / "corpus.jsonl", folder / "index")
    return folder


def played(folder, questions, horizons=(1,), max_context=8192, **settings):
    made = {}
    tokenizer = load_tokenizer(TOKENIZER)
    config = TasksConfig(max_context=max_context, **settings)
    index = open_index(folder / "index")
    episodes = list(demonstrate({"set": questions}, horizons, index, tokenizer, made, config))
    return episodes, made["set"], codec_of(tokenizer).decode


def test_keywords_keep_names():
    assert keywords("who wrote he ain't heavy he's my brother lyrics") == "wrote ain't heavy he's brother lyrics"
    assert keywords("Which film came first, The Prairie King or It?") == "film came first The Prairie King It"
    assert keywords("who is it") == "who is it"  # nothing else is left to search for


def test_words_are_compared_whole():
    assert contains("It rises in the Tarn.", "tarn")
    assert not contains("It rises in Tarnow.", "Tarn")
    assert not contains("anything", "the")  # nothing is left of it


def test_a_long_sentence_is_cut_around_its_lead():
    text = "Ann (born 1900, in Tarn) was " + ", ".join(f"winner of prize number {i}" for i in range(20)) + "."
    assert clause(Passage("a", "Ann", text), []) == (
        "Ann (born 1900, in Tarn) was winner of prize number 0, winner of prize number 1, winner of prize number 2"
    )
    assert clause(Passage("a", "Ann", text), ["prize number 17"]) == "Ann: winner of prize number 17"


def test_sentences_do_not_end_at_abbreviations():
    passage = Passage("a", "Ann", "She met J. R. Smith of St. Louis in 1901. He was tall.")
    assert clause(passage, []) == "Ann: She met J. R. Smith of St. Louis in 1901"


def test_one_hop(folder):
    (episode,), made, decode = played(folder, [ONE])
    assert [decode(c.completion) for c in episode.calls] == [
        "<think>Next 1.</think>\n<search>river Velm rise</search>",
        "<think>1: the Tarn.</think>\n<answer>the Tarn</answer>",
    ]
    assert (made.questions, made.with_gold, made.solved, made.calls) == (1, 1, 1, 2)
    assert (episode.reward, episode.memory) == (1.0, "mem1")


def test_two_hops_search_for_the_name_that_was_read(folder):
    (episode,), _, decode = played(folder, [TWO], topk=1)
    film = "Kiss and Tell (1945 film): It stars Shirley Temple as Corliss Archer"
    assert [decode(c.completion) for c in episode.calls] == [
        "<think>Next 1.</think>\n<search>position star Kiss Tell Corliss Archer's film hold</search>",
        f"<think>1: {film}. Next 1.</think>\n<search>Shirley Temple</search>",
        f"<think>1: {film}. Shirley Temple: As an adult she was Chief of Protocol, and an ambassador. "
        "So Chief of Protocol.</think>\n<answer>Chief of Protocol</answer>",
    ]


def test_everything_noted_was_read_before(folder):
    """Every sentence and answer is in the documents of a call of the episode, or in the question."""
    episodes, _, decode = played(folder, [ONE, TWO, LONGER, BARE], (1, 2, 4))
    assert len(episodes) == 4 + 2 + 1
    for episode in episodes:
        asked = decode(episode.calls[0].prompt)
        read = [text for c in episode.calls for pair in documents_of(decode(c.prompt)) for text in pair]
        answers = decode(episode.calls[-1].completion).partition("<answer>")[2].removesuffix("</answer>")
        assert all(contains("\n".join([asked, *read]), answer) for answer in answers.split("; "))


def test_a_summary_carries_the_answers_so_far(folder):
    (episode,), _, decode = played(folder, [ONE, BARE, TWO, LONGER], (4,))
    last = decode(episode.calls[-1].completion)
    answers = last.partition("<answer>")[2].removesuffix("</answer>").split("; ")
    assert sorted(answers) == ["Chief of Protocol", "Oder", "Tarin Oskel", "the Tarn"]
    notes = last.partition("</think>")[0]
    assert all(f"{n}: {answer}." in notes for n, answer in enumerate(answers[:3], 1))


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (Question("q", "Where does the river Velm rise?", ("Moravia",), supporting=("velm",)), NOT_SAID),
        (Question("q", "Where does the river Velm rise?", ("river of; 90 km",), supporting=("velm",)), NOT_SAID),
        (Question("q", "Who built clocks?", ("Moravia",), supporting=("oder",)), NOT_FOUND),
        (Question("q", "Who built clocks?", ("yes",)), NOT_FOUND),  # "yes" cannot be read anywhere
        (Question("q", "Where does the Velm rise?", ("Tarn",), supporting=("velm", "temple")), NOT_NAMED),
    ],
)
def test_what_was_not_found_is_not_answered(folder, question, reason):
    episodes, made, _ = played(folder, [question])
    assert not episodes
    assert dict(made.failures) == {reason: 1}


def test_a_context_without_room_is_a_reason(folder):
    episodes, made, _ = played(folder, [ONE, TWO], max_context=330)
    assert [e.task_id for e in episodes] == ["set-q1-velm"]
    assert (made.solved, made.failures) == (1, {NO_ROOM: 1})


def test_an_answer_that_the_tokenizer_changes_is_a_reason(tmp_path):
    """A special token is no text: the environment reads an empty answer."""
    write_corpus(
        tmp_path / "corpus.jsonl", [Passage("sign", "Sign", "A turn ends with the sign <|im_end|> here."), *PASSAGES]
    )
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    question = Question("sign", "Which sign ends a turn?", ("<|im_end|>",), supporting=("sign",))
    episodes, made, _ = played(tmp_path, [question])
    assert not episodes
    assert made.failures == {NOT_GRADED: 1}


def test_yes_and_no_only_when_asked(folder):
    both = Question("q", "Are the Velm and the Oder rivers?", ("yes",), supporting=("velm", "oder"))
    index, tokenizer = open_index(folder / "index"), load_tokenizer(TOKENIZER)
    config, made = TasksConfig(max_context=8192), {}
    assert not list(demonstrate({"set": [both]}, (1,), index, tokenizer, made, config))
    assert dict(made["set"].failures) == {NOT_SAID: 1}
    (episode,) = demonstrate({"set": [both]}, (1,), index, tokenizer, made, config, yes_no=True)
    assert codec_of(tokenizer).decode(episode.calls[-1].completion).endswith("So yes.</think>\n<answer>yes</answer>")


def test_a_word_in_a_passage_is_no_yes_or_no(folder):
    word = Question("q", "Which use has Thing 3 of wood?", ("no",), supporting=("x3",))  # "A thing of no use"
    assert not played(folder, [word])[0]


def test_gold_passages_that_the_index_lacks_leave_the_answers(folder):
    (episode,), made, _ = played(folder, [Question("q", "Who built clocks?", ("Tarin Oskel",), supporting=("gone",))])
    assert (made.with_gold, episode.reward) == (0, 1.0)


def test_a_rule_that_changes_queries_is_refused(folder):
    with pytest.raises(ValueError, match="'refresh' changes the queries"):
        played(folder, [ONE], memory="refresh")


class Noting(Mem1):
    """A rule that makes a call of its own before each context."""

    def context(self, turns):
        note = yield Ask("What do you know?", purpose="note")
        return [Piece(note.ids, "memory", note.call), *super().context(turns)]


@pytest.mark.parametrize("memory", ["full_response", "summary", "test_demonstrator:Noting"])
def test_other_memory_rules(folder, memory):
    episodes, _, _ = played(folder, [ONE, TWO], (2,), memory=memory)
    assert [e.reward for e in episodes] == [2.0]


def test_the_seed_changes_the_tasks_alone(folder):
    index, tokenizer = open_index(folder / "index"), load_tokenizer(TOKENIZER)
    config = TasksConfig(max_context=8192)
    asked = {"set": [ONE, TWO, LONGER, BARE]}
    ids = [
        tuple(e.task_id for e in demonstrate(asked, (2,), index, tokenizer, {}, config, seed))
        for seed in (0, 0, 1, 2, 3)
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) > 1


# ---- the command -----------------------------------------------------------------------------------------------------


def rows(path: Path, *questions: Question) -> Path:
    lines = [
        {"id": q.id, "question": q.text, "golden_answers": q.answers, "metadata": {"supporting_ids": q.supporting}}
        for q in questions
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def memopd_demonstrate(folder, *arguments):
    given = ["demonstrate", *arguments, "--index", folder / "index", "--tokenizer", TOKENIZER]
    return CliRunner().invoke(app, [str(a) for a in given])


def test_the_store_is_ready_for_sft(folder, tmp_path):
    wrong = Question("wrong", "Who made Thing 3?", ("Ann",), supporting=("x3",))
    one = rows(tmp_path / "one.jsonl", ONE, BARE, wrong)
    two = rows(tmp_path / "two.jsonl", TWO, LONGER)
    store = tmp_path / "store.parquet"
    options = ("-k", "1,2", "--max-context", 8192, "-o", store, "--json")
    done = memopd_demonstrate(folder, one, two, *options)
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert (made["one"]["questions"], made["one"]["solved"], made["one"]["failures"]) == (3, 2, {NOT_SAID: 1})
    assert (made["one"]["tasks"], made["one"]["episodes"]) == ({"1": 3, "2": 1}, {"1": 2, "2": 1})
    assert made["two"]["episodes"] == {"1": 2, "2": 1}
    episodes = list(read_episodes(store))
    assert sum(len(e.calls) for e in episodes) == made["one"]["calls"] + made["two"]["calls"]
    decode = codec_of(load_tokenizer(TOKENIZER)).decode
    assert len(load_examples([str(store)], ("correct", "valid"), decode, 8192)) == len(episodes) == 6
    assert "already exists" in str(memopd_demonstrate(folder, one, *options).exception)


def test_only_the_questions_of_a_part(folder, tmp_path):
    split = tmp_path / "split.json"
    split.write_text(json.dumps({"one": {"sft": ["velm"], "rl": ["bare"]}}))
    one = rows(tmp_path / "one.jsonl", ONE, BARE)
    options = (one, "-k", "1", "--max-context", 8192, "--split", split)
    done = memopd_demonstrate(folder, *options, "--part", "sft", "-o", tmp_path / "sft")
    assert done.exit_code == 0, done.output
    assert [e.task_id for e in read_episodes(tmp_path / "sft")] == ["one-q1-velm"]
    assert "1 of 1" in done.stdout
    done = memopd_demonstrate(folder, *options, "--part", "dev", "-o", tmp_path / "dev")
    assert "has no part 'dev'; its parts are rl, sft" in str(done.exception)
    done = memopd_demonstrate(folder, *options, "-o", tmp_path / "dev")
    assert "--split and --part belong together" in str(done.exception)


def test_nothing_solved_is_an_error(folder, tmp_path):
    wrong = rows(tmp_path / "wrong.jsonl", Question("wrong", "Who made Thing 3?", ("Ann",), supporting=("x3",)))
    done = memopd_demonstrate(folder, wrong, "-o", tmp_path / "store", "--max-context", 8192)
    assert "none of the questions could be solved" in str(done.exception)
    assert not (tmp_path / "store").exists()
