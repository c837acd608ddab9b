"""Text as it comes is the text as a whole, whatever is sampled: half characters, special tokens, stop strings."""

from __future__ import annotations

import numpy as np
import pytest
from gateway_parts import encode, letters, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd.gateway.text import Cut, StreamedText, cut_text, full_text, visible_text

any_id = st.integers(0, len(tokenizer()) - 1)
words = st.sampled_from(["the old town", "</search>", "東京", "🙂", " a", "é", "<|im_end|>"])
pieces = st.one_of(any_id.map(lambda id: [id]), words.map(encode), words.map(letters))
stops = st.lists(st.sampled_from(["</search>", "town", "e", "東", "\ufffd", "< /", " a a"]), max_size=3, unique=True)


@settings(max_examples=400, deadline=None)
@given(st.lists(pieces, max_size=12), stops, st.booleans(), st.lists(st.integers(1, 5), min_size=1, max_size=9))
def test_pieces_add_up_to_the_whole(parts, stop, keep, steps):
    ids = [id for part in parts for id in part]
    streamed = StreamedText(tokenizer(), stop, keep)
    shown, at, turn = "", 0, 0
    while at < len(ids):
        step = steps[turn % len(steps)]
        shown += streamed.feed(ids[at : at + step])
        at, turn = at + step, turn + 1
    cut = cut_text(tokenizer(), np.asarray(ids, np.int32), stop, keep)
    whole = cut.visible
    assert whole.startswith(shown)
    assert shown + streamed.end(whole) == whole
    assert full_text(tokenizer(), np.asarray(ids, np.int32), len(whole)).startswith(cut.full)


def test_nothing_waits_that_is_certain():
    streamed = StreamedText(tokenizer(), ["</search>"])
    assert streamed.feed(encode("the old town")) == "the old town"
    assert streamed.feed(letters("</sea")) == ""
    assert streamed.feed(letters("l")) == "</seal"
    assert streamed.feed(letters(" </search>")) == " "
    assert streamed.feed(encode("more")) == ""


@pytest.mark.parametrize(("keep", "text"), [(False, "a "), (True, "a town")])
def test_the_stop_string_that_is_complete_first_counts(keep, text):
    ids = np.asarray(encode("a town, the river"), np.int32)
    assert visible_text(tokenizer(), ids, ["a town, the", "river", "town"], keep) == text


def test_the_full_text_has_the_special_tokens_of_what_is_shown():
    text = "the old<|im_end|> town<|im_end|>"
    ids = np.asarray(encode(text), np.int32)
    assert cut_text(tokenizer(), ids, [" town"]) == Cut("the old", "the old<|im_end|>", " town")
    assert cut_text(tokenizer(), ids, []) == Cut("the old town", text, None)
    shown = {count: full_text(tokenizer(), ids, count) for count in (3, 7, 9, 12)}
    assert shown == {3: "the", 7: "the old<|im_end|>", 9: "the old<|im_end|> t", 12: text}
