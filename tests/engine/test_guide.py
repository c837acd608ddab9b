"""Constrained decoding: the text follows its grammar, the log-probabilities are those of the restricted distribution,
and requests beside it are not changed."""

import json
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from memopd.engine import Request
from memopd.engine.guide import guides_of
from memopd.engine.local import LocalEngine
from memopd.types import Sampling, StopReason
from memopd.world.tokenizer import train_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "東京"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"
UNKNOWN = 5  # ids that the model has and the tokenizer does not


@cache
def tokenizer():
    return train_tokenizer(["the river flows past the old town and it is long"], 290)


@cache
def engine() -> LocalEngine:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer()) + UNKNOWN, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, eos_token_id=tokenizer().eos_token_id,
    )  # fmt: skip
    return LocalEngine(transformers.Qwen2ForCausalLM(config).eval(), tokenizer(), max_length=256)


def request(seed: int, grammar: str = "", top: int = 0, **sampling) -> Request:
    return Request(np.array([5, 6, 7], np.int32), seed, Sampling(max_tokens=80, **sampling), (), "", "", grammar, top)


def test_the_text_follows_the_grammar_and_the_draws_the_restricted_distribution():
    requests = [request(seed, GRAMMAR if seed % 2 else "") for seed in range(8)]
    beside = engine().generate([r for r in requests if not r.grammar])
    together = engine().generate(requests)
    for alone, same in zip(beside, together[::2], strict=True):
        np.testing.assert_array_equal(alone.tokens, same.tokens)  # whatever ran beside it
    for asked, made in zip(requests[1::2], together[1::2], strict=True):
        assert made.stop is StopReason.STOP
        assert made.tokens[-1] == tokenizer().eos_token_id
        said = json.loads(tokenizer().decode(made.tokens[:-1]))
        assert said["city"] in ("Oslo", "東京")
        assert 0 <= said["n"] <= 99
        np.testing.assert_allclose(made.logprobs, restricted(asked, made.tokens), atol=1e-5)


def restricted(asked: Request, tokens: np.ndarray) -> list[float]:
    """The log-probabilities by hand: one pass over the whole row, and -inf where the grammar allows no token."""
    guide = guides_of(tokenizer(), engine().vocabulary, [tokenizer().eos_token_id])(asked.grammar)
    with torch.no_grad():
        logits = engine().model(torch.tensor([[*asked.prompt.tolist(), *tokens.tolist()]])).logits[0]
    found = []
    for n, token in enumerate(tokens.tolist()):
        row = logits[len(asked.prompt) - 1 + n].double()
        allowed = torch.from_numpy(guide.allowed())
        assert not allowed[len(tokenizer()) :].any()
        found.append(float(row.masked_fill(~allowed, -torch.inf).log_softmax(-1)[token]))
        if token != tokenizer().eos_token_id:
            guide.take(token)
    return found


def test_a_grammar_that_nobody_can_read_is_refused_and_a_token_outside_it_too():
    with pytest.raises(ValueError, match="the grammar is not supported"):
        engine().generate([request(0, "start: %json {")])
    guide = guides_of(tokenizer(), engine().vocabulary, [tokenizer().eos_token_id])(GRAMMAR)
    with pytest.raises(ValueError, match="the grammar cannot be followed"):
        guide.take(tokenizer()("town", add_special_tokens=False)["input_ids"][0])


@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"temperature": 0.5}])
def test_the_likeliest_tokens(cut):
    plain, listed = engine().generate([request(3, **cut), request(3, top=4, **cut)])
    np.testing.assert_array_equal(plain.tokens, listed.tokens)
    assert plain.top == ()
    assert len(listed.top) == len(listed.tokens)
    for token, logprob, top in zip(listed.tokens, listed.logprobs, listed.top, strict=True):
        assert len(top) == (3 if "top_k" in cut else 4)
        values = [p for _, p in top]
        assert values == sorted(values, reverse=True)
        if "top_k" in cut:
            assert np.exp(values).sum() == pytest.approx(1)
        known = dict(top)
        assert known.get(int(token), logprob) == pytest.approx(logprob, abs=1e-5)
