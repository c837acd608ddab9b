"""Token ids stay exact with real tokenizers, Qwen2.5's and SmolLM2's, and tiny random models of their vocabularies."""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers
from gateway_parts import MODEL, client, serving
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from memopd.agent import Agent, Observation, Outcome
from memopd.agent.codec import codec_of, prefix_of
from memopd.agent.memory import RULES, Mem1, memory_rule
from memopd.agent.protocol import STOPS
from memopd.compile.controls import stable_prefix
from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.engine.stops import Stops, vocabulary_bytes
from memopd.gateway.ask import ApiError, Ask
from memopd.gateway.prompt import prompt_of, with_known_roles
from memopd.gateway.text import StreamedText, visible_text
from memopd.gateway.tools import ToolForm
from memopd.record import read_episodes, write_episodes
from memopd.report.episodes import texts
from memopd.tasks import Question, Task
from memopd.types import Episode, Sampling, Segment, StopReason
from memopd.verify.audit import audit

TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"
NAMES = ["qwen2.5-coder-0.5b", "smollm2-135m"]
SYSTEM = {"qwen2.5-coder-0.5b": "You are Qwen, created by Alibaba Cloud.", "smollm2-135m": "named SmolLM, trained by"}
UNKNOWN = 128  # ids that the model has and the tokenizer does not, as in Qwen2.5's larger models

pytestmark = [
    pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="needs the real tokenizers of ../shared/tokenizers"),
    pytest.mark.parametrize("name", NAMES),
]


@cache
def tokenizer(name: str):
    return AutoTokenizer.from_pretrained(TOKENIZERS / name)


@cache
def vocabulary(name: str) -> list[bytes]:
    return vocabulary_bytes(tokenizer(name), len(tokenizer(name)) + UNKNOWN)


@cache
def bytes_of(name: str) -> set[int]:
    """The bytes that are tokens by themselves, from which all others are merged."""
    return {text[0] for text in vocabulary(name) if len(text) == 1}


@cache
def model(name: str):
    """A tiny model with a tied head. Its vocabulary is larger than the tokenizer's."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer(name)) + UNKNOWN, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer(name).eos_token_id,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).eval()


@cache
def engine(name: str) -> LocalEngine:
    return LocalEngine(model(name), tokenizer(name), slots=4, max_length=1024)


@cache
def mem1_stops(name: str) -> Stops:
    return Stops(STOPS, vocabulary(name))


def text_of(name: str, ids) -> str:
    return codec_of(tokenizer(name)).decode(np.asarray(ids, np.int32))


# ---- bytes, text and ids --------------------------------------------------------------------------------------


any_text = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=40)
usual_text = st.lists(
    st.sampled_from(["</search>", ">\n", "</answer>.", " 東京", "🙂", "é", "naïve", "  ", "\n\n", "<|im_end|", "1984"])
).map("".join)
text = st.one_of(any_text, usual_text)


@settings(max_examples=30, deadline=None)
@given(text)
def test_ids_are_the_bytes_of_their_text(name, text):
    """Qwen's tokenizer composes characters (NFC) before it encodes. SmolLM2's drops the bytes that it has no token for,
    some control characters."""
    composed = unicodedata.normalize("NFC", text) if name.startswith("qwen") else text
    assume(bytes_of(name) >= set(composed.encode()))
    ids = codec_of(tokenizer(name)).encode(text)
    assert b"".join(vocabulary(name)[i] for i in ids) == composed.encode()
    if not set(ids) & special_ids(name):
        assert text_of(name, ids) == composed


@settings(max_examples=30, deadline=None)
@given(
    text,
    st.integers(0, 12),
    st.sampled_from([(), ("</search>",), ("東", "\n\n")]),
    st.lists(st.integers(1, 4), min_size=1),
)
def test_characters_that_the_token_limit_cuts(name, text, limit, stops, steps):
    """Streamed pieces add up to the visible text, and a character is shown once all of its bytes are there."""
    assume(bytes_of(name) >= set(unicodedata.normalize("NFC", text).encode()) | set(text.encode()))
    ids = codec_of(tokenizer(name)).encode(text)[:limit]
    streamed, shown, at = StreamedText(tokenizer(name), stops), "", 0
    for step in steps * (limit + 1):
        shown += streamed.feed(ids[at : at + step].tolist())
        at += step
    whole = visible_text(tokenizer(name), ids, stops)
    assert shown + streamed.end(whole) == whole
    assert "\ufffd" not in shown
    sampled = b"".join(vocabulary(name)[i] for i in ids).decode(errors="ignore")
    if not stops and not set(ids) & special_ids(name):
        assert whole.rstrip("\ufffd") == sampled


@cache
def special_ids(name: str) -> set[int]:
    """All that are left out of the text. `all_special_ids` has only those with a role, such as the end of a text."""
    return {i for i, token in tokenizer(name).added_tokens_decoder.items() if token.special}


# ---- stops in the engine ----------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)  # each makes the stops of its string anew, from the whole vocabulary
@given(st.integers(0, 10**6), st.data())
def test_any_stop_in_any_sampled_text(name, seed, data):
    """The ids are those that the same draws give without a stop, up to the token in which the stop string ends."""
    request = Request(prefix_of(tokenizer(name), "go on"), seed, Sampling(max_tokens=10))
    (free,) = engine(name).generate([request])
    sampled = b"".join(vocabulary(name)[i] for i in free.tokens).decode(errors="replace")
    start = data.draw(st.integers(0, len(sampled) - 1))
    stop = sampled[start : start + data.draw(st.integers(1, 6))]
    assume("\ufffd" not in stop and not set(free.tokens.tolist()) & special_ids(name))
    (stopped,) = engine(name).generate([Request(request.prompt, seed, request.sampling, (stop,))])
    needed = next(n for n in range(1, 11) if stop.encode() in b"".join(vocabulary(name)[i] for i in free.tokens[:n]))
    assert stopped.tokens.tolist() == free.tokens[:needed].tolist()
    assert stopped.stop is StopReason.STOP
    np.testing.assert_allclose(stopped.logprobs, free.logprobs[:needed], atol=1e-5)
    shown = visible_text(tokenizer(name), stopped.tokens, [stop])
    assert text_of(name, stopped.tokens).startswith(shown + stop)
    assert stop not in shown
    assert visible_text(tokenizer(name), stopped.tokens, [stop], keep_stop=True) == shown + stop


@pytest.mark.parametrize("after", ["\n", ".", "x", "</", "東"])
def test_a_stop_that_ends_inside_a_token_keeps_the_token(name, after):
    ids = codec_of(tokenizer(name)).encode(f"<think>a</think><search>b</search>{after} more")
    stops = mem1_stops(name)
    end = next(n for n in range(1, len(ids) + 1) if stops.end(ids[:n].tolist()))
    said = text_of(name, ids[:end])
    assert said.startswith("<think>a</think><search>b</search>")
    if name.startswith("qwen") and after in "\n.x":
        assert said.endswith(f"</search>{after}")  # `>` and what follows are one token
    assert visible_text(tokenizer(name), ids[:end], STOPS, keep_stop=True) == "<think>a</think><search>b</search>"


def test_a_stop_that_cuts_a_character_of_several_bytes(name):
    """Every token that ends inside a character, stopped by what is before it: half of a character is never shown."""
    texts = [(i, text, text.decode(errors="ignore")) for i, text in enumerate(vocabulary(name)[:-UNKNOWN])]
    cut = [(i, said) for i, text, said in texts if said and said.encode() != text and text.startswith(said.encode())]
    assert len(cut) > 30
    hello = codec_of(tokenizer(name)).encode("hello").tolist()
    for i, stop in cut:
        ids = np.array([*hello, i], np.int32)
        streamed = StreamedText(tokenizer(name), (stop,))
        shown = "".join(streamed.feed([one]) for one in ids.tolist())
        assert shown + streamed.end("hello") == visible_text(tokenizer(name), ids, [stop]) == "hello"
        assert visible_text(tokenizer(name), ids, [stop], keep_stop=True) == f"hello{stop}"
    for i, stop in cut[:: len(cut) // 3]:
        stops = Stops((stop,), vocabulary(name))
        assert not stops.end(hello)
        assert stops.end([*hello, i])


# ---- contexts -----------------------------------------------------------------------------------------------------


class Talk:
    """An environment in which every response gets an observation, for three turns."""

    def start(self, task):
        return Observation("Say something.", ("e",))

    def step(self, live):
        return [Observation(None if len(p.responses) > 2 else "\n<information>\n東京</information>\n") for p in live]

    def grade(self, task, responses):
        return Outcome(0.0)


def played(name: str, rule: str, seed: int = 0) -> Episode:
    memory = memory_rule(rule, codec_of(tokenizer(name)))
    agent = Agent(engine(name), Talk(), memory, tokenizer(name), Sampling(max_tokens=9), rule=rule)
    (episode,) = agent.play([Task("t", (Question("0", "?", ("a",)),))], seed)
    return episode


def test_a_system_prompt_that_the_template_inserts_belongs_to_q(name):
    q = prefix_of(tokenizer(name), "Say something.")
    said = tokenizer(name).decode(q)
    assert said.startswith("<|im_start|>system\n")
    assert SYSTEM[name] in said
    assert said.endswith("<|im_start|>user\nSay something.<|im_end|>\n<|im_start|>assistant\n")
    episode = played(name, "mem1")
    assert [c.segments[0] for c in episode.calls] == [Segment("prefix", 0, len(q))] * 3
    assert stable_prefix(episode) == len(q)
    assert all(c.prompt[: len(q)].tolist() == q.tolist() for c in episode.calls)


@pytest.mark.parametrize("seed", range(4))
def test_memory_keeps_the_ids_that_were_sampled(name, seed):
    """Whatever was sampled, half characters and unknown ids too: the next prompt is q, those ids, the observation."""
    q = prefix_of(tokenizer(name), "Say something.").tolist()
    observed = codec_of(tokenizer(name)).encode("\n<information>\n東京</information>\n").tolist()
    for rule, keeps in (("mem1", 1), ("full_response", 3)):
        calls = played(name, rule, seed).calls
        assert calls[0].prompt.tolist() == q
        for t in (1, 2):
            turns = [[*c.completion.tolist(), *observed] for c in calls[max(0, t - keeps) : t]]
            assert calls[t].prompt.tolist() == q + [i for turn in turns for i in turn]


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {"amem"}))  # it needs an embedding model
def test_every_rule_rebuilds_its_prompts_from_its_segments(name, rule):
    for call in played(name, rule).calls:
        assert [s.start for s in call.segments] == [0, *(s.stop for s in call.segments[:-1])]
        assert call.segments[-1].stop == len(call.prompt)


# ---- ids that no token has -------------------------------------------------------------------------------------


@cache
def odd_engine(name: str) -> LocalEngine:
    """It samples ids that the tokenizer does not have about as often as others."""
    known = len(tokenizer(name))
    torch.manual_seed(0)
    made = transformers.Qwen2ForCausalLM(
        model(name).config.__class__(**model(name).config.to_dict() | {"tie_word_embeddings": False})
    )
    with torch.no_grad():
        made.lm_head.weight.zero_()
        made.lm_head.weight[known - 2 * UNKNOWN :].normal_(std=3.0)
    return LocalEngine(made.eval(), tokenizer(name), slots=4, max_length=1024)


def test_ids_that_no_token_has_are_recorded_stopped_audited_and_shown(name, tmp_path):
    known = len(tokenizer(name))
    agent = Agent(odd_engine(name), Talk(), Mem1(), tokenizer(name), Sampling(max_tokens=12), rule="mem1")
    tasks = [Task(f"t{i}", (Question("0", "?", ("a",)),)) for i in range(2)]
    episodes = sorted(agent.play(tasks), key=lambda e: e.id)
    sampled = np.concatenate([c.completion for e in episodes for c in e.calls])
    assert (sampled >= known).any()
    assert (sampled < known).any()
    write_episodes(tmp_path / "store", episodes)
    again = sorted(read_episodes(tmp_path / "store"), key=lambda e: e.id)
    assert [c.completion.tolist() for e in again for c in e.calls] == [
        c.completion.tolist() for e in episodes for c in e.calls
    ]
    report = audit(odd_engine(name).model, again, "dense")
    assert report.passed
    assert report.recorded.p99 < 1e-4
    shown = texts(tokenizer(name), sorted(set(sampled.tolist())))
    assert {shown[i] for i in shown if i >= known} == {""}
    for call in episodes[0].calls:
        assert text_of(name, call.completion) == text_of(name, call.completion[call.completion < known])


def test_a_gateway_answers_with_ids_that_no_token_has(name, tmp_path):
    known = len(tokenizer(name))
    with serving(odd_engine(name), tmp_path / "store") as url:
        asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3}
        extra = {"return_token_ids": True}
        answer = client(url, "e").chat.completions.create(**asked, logprobs=True, extra_body=extra)
        ids = answer.choices[0].token_ids
        chunks = client(url, "e").chat.completions.create(**asked, stream=True)
        streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert httpx.post(f"{url}/episodes/e/reward", json={"reward": 1}).status_code == 200
    assert max(ids) >= known
    assert [t.token == "" for t in answer.choices[0].logprobs.content] == [i >= known for i in ids]
    assert answer.choices[0].message.content == streamed == text_of(name, ids)
    (episode,) = read_episodes(tmp_path / "store")
    assert [c.completion.tolist() for c in episode.calls] == [ids, ids]


# ---- roles ----------------------------------------------------------------------------------------------------------


def prompt(name: str, *messages: tuple[str, str]) -> list[int]:
    given = with_known_roles(tokenizer(name), [{"role": r, "content": c} for r, c in messages])
    return prompt_of(tokenizer(name), Ask(model="m"), given, [], ToolForm(tokenizer(name)))


def test_a_developer_is_the_system_where_the_template_knows_no_developer(name):
    """Qwen's template leaves such a message out without an error; SmolLM2's writes a role that no model saw."""
    as_system = prompt(name, ("system", "Be brief."), ("user", "hi"))
    assert prompt(name, ("developer", "Be brief."), ("user", "hi")) == as_system
    assert "<|im_start|>system\nBe brief.<|im_end|>" in tokenizer(name).decode(as_system)
    assert SYSTEM[name] not in tokenizer(name).decode(as_system)


def test_a_template_that_knows_developers_gets_them(name, monkeypatch):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}{# system, developer, user #}"
    monkeypatch.setattr(tokenizer(name), "chat_template", template)
    assert tokenizer(name).decode(prompt(name, ("developer", "Be brief."))) == "developer: Be brief."


def test_a_message_that_the_template_would_drop_is_an_error(name, monkeypatch):
    if name.startswith("qwen"):
        with pytest.raises(ApiError, match=r"leaves out messages\[1\]: does it know the role 'critic'\?") as caught:
            prompt(name, ("user", "hi"), ("critic", "No."))
        assert (caught.value.status, caught.value.param) == (400, "messages[1]")
    else:
        assert "critic\nNo." in tokenizer(name).decode(prompt(name, ("user", "hi"), ("critic", "No.")))
