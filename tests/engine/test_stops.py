"""Stop strings: found in bytes, across tokens, inside tokens, and never by changing an id."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from memopd.engine.protocol import MAX_STOPS, Request
from memopd.engine.stops import FOUND, Stops, vocabulary_bytes

TEXT = "naïve </search> 東京 is 🦊 and </answer>!\n"


def byte_level(merges=(), alphabet=None):
    """A byte-level BPE with these merges, in its own alphabet (Ġ is a space)."""
    alphabet = alphabet or sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    made = Tokenizer(models.BPE(vocabulary, [tuple(m) for m in merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


MERGES = [("<", "/"), ("c", "h"), ("ch", ">"), ("ch>", "Ġ"), ("a", "n"), ("Ġ", "an")]


def test_every_id_has_its_bytes():
    tokenizer = byte_level(MERGES)
    vocabulary = vocabulary_bytes(tokenizer, len(tokenizer) + 5)
    ids = tokenizer(TEXT + "<|end|>").input_ids
    assert b"".join(vocabulary[i] for i in ids) == (TEXT + "<|end|>").encode()
    assert any(len(vocabulary[i]) == 1 and vocabulary[i][0] > 127 for i in ids)  # characters are split
    assert vocabulary[-5:] == [b""] * 5  # a model's vocabulary is often padded


def test_sentencepiece_vocabularies():
    tokens = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [("▁", "a")], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    vocabulary = vocabulary_bytes(tokenizer, len(tokenizer))
    assert b"".join(vocabulary[i] for i in tokenizer("a b東 ab").input_ids) == " a b東 ab".encode()


def test_other_vocabularies_decode_token_by_token():
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert vocabulary_bytes(tokenizer, 3) == [b"a", b"b", b"?"]


def test_ids_above_those_that_a_tokenizer_leaves_out():
    made = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 5}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert vocabulary_bytes(tokenizer, 7) == [b"?", b"a", b"", b"", b"", b"b", b""]


@pytest.mark.parametrize(
    ("stop", "tokens", "ends"),
    [
        ("</a>", ["x", "</", "a", ">"], 3),  # across tokens
        ("</a>", ["x", "</a> and more"], 1),  # inside a token, which stays whole
        ("</a>", ["x</", "a> and </", "a>"], 1),
        ("</a>", ["</", "a", "</", "a", ">"], 4),  # a false start
        ("aab", ["a", "a", "a", "b"], 3),  # overlapping starts
        ("é", ["x", b"\xc3", b"\xa9!"], 2),  # a character over two tokens
        ("東", [b"\xe6\x9d", b"\xe6", b"\x9d\xb1"], 2),  # bytes that are no character before it
        ("b", ["a", "", "b"], 2),  # tokens that add nothing
        ("</a>", ["</", "a", "x>"], None),
        (("abcd", "bc"), ["a", "b", "c"], 2),  # the second begins inside the first
        (("abcd", "bce"), ["abc", "e"], 1),
        (("ab", "abc"), ["a", "b"], 1),
        (("abc", "ab"), ["a", "b"], 1),
    ],
)
def test_where_a_stop_string_ends(stop, tokens, ends):
    vocabulary = [t.encode() if isinstance(t, str) else t for t in tokens]
    stops = Stops((stop,) if isinstance(stop, str) else stop, vocabulary)
    ids = list(range(len(tokens)))
    assert next((i for i in ids if stops.end(ids[: i + 1])), None) == ends


def test_the_automaton_is_as_large_as_the_strings():
    """60,000 characters once took 1.7 GB: every end of a string was kept."""
    strings = tuple(f"{first}{'ab' * 127}é" for first in "cdefghijklmnopqr")
    assert len(strings) == MAX_STOPS
    size = sum(len(s.encode()) for s in strings)
    assert Stops(strings, []).states == size - len(strings) + 1  # the last byte of a string needs no state of its own
    assert Stops(strings[:4], []).states == size // 4 - 3
    assert Stops(("aaaa", "aab", "aaaa"), []).states == 4  # "", a, aa, aaa: equal beginnings are one


def test_a_token_costs_its_own_bytes():
    """Bytes that are read again after a false start are at most as many as were read before it."""
    stops = Stops(("a" * 255 + "b",), [b"a", b"c"])
    steps = 0

    class Counted(dict):
        def get(self, byte):
            nonlocal steps
            steps += 1
            return dict.get(self, byte)

    stops._next = [Counted(d) for d in stops._next]
    state = 0
    for token in ([0] * 254 + [1]) * 20:
        state = stops.after(state, token)
    assert steps <= 2 * 255 * 20


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (("x",) * 17, "stop: at most 16 stop strings, got 17"),
        (("é" * 257,), "stop: at most 256 characters per stop string, got 257"),
        (("a", ""), "stop: a stop string must not be empty"),
        ("</search>", r"stop: give a tuple of strings, such as \('</search>',\), not one string"),
    ],
)
def test_limits_of_a_request(stop, said):
    with pytest.raises(ValueError, match=said):
        Request([1], seed=0, stop=stop)
    Request([1], seed=0, stop=("é" * 256,) * 16)
    with pytest.raises(ValueError, match="episode 'e': top_logprobs must be 0 or more, got -1"):
        Request([1], seed=0, episode="e", top_logprobs=-1)


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=40),
    st.lists(st.text("ab", min_size=2, max_size=6) | st.text("ab<é東", min_size=1, max_size=6), min_size=1, max_size=6),
)
def test_as_if_all_text_were_searched(tokens, strings):
    vocabulary = [b"a", b"ab<", b"<", b"\xc3", b"\xa9a", b"", b"b\xe6\x9d", b"\xb1b"]
    stops = Stops(tuple(strings), vocabulary)
    state = 0
    for n in range(1, len(tokens) + 1):
        text, before = (b"".join(vocabulary[t] for t in tokens[:m]) for m in (n, n - 1))
        found = any(s.encode() in text for s in strings)
        assert stops.end(tokens[:n]) == found
        state = stops.after(state, tokens[n - 1])
        assert (state == FOUND) == found
        if found:
            break
        assert not any(s.encode() in before for s in strings)
