"""Each context-update rule by hand, on ids that stand for themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd.agent.codec import Codec
from memopd.agent.memory import RULES, Truncate, Turn, assemble, memory_rule
from memopd.types import Segment


def ids(*values):
    return np.array(values, np.int32)


def encode(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


CODEC = Codec(encode, lambda a: bytes(a.tolist()).decode())
THINK = encode("<think>sum</think><search>q</search>")
TURNS = [
    Turn(ids(1, 2, 3), ids(10, 11), call=0),
    Turn(ids(4, 5), ids(12), call=1),
    Turn(THINK, ids(13, 14), call=4),  # the memory made two calls of its own before it
]
SUMMARY = encode("<think>sum</think>").tolist()
A2 = THINK.tolist()
PLAIN = [rule for rule in RULES if rule != "amem"]  # which asks the model: test_amem.py


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("mem1", [*A2, 13, 14]),
        ("full_response", [1, 2, 3, 10, 11, 4, 5, 12, *A2, 13, 14]),
        ("suffix:4", [*A2[-4:], 13, 14]),
        ("summary", [*SUMMARY, 13, 14]),
        ("window:2", [4, 5, 12, *A2, 13, 14]),
        ("window:9", [1, 2, 3, 10, 11, 4, 5, 12, *A2, 13, 14]),
        ("refresh", [*SUMMARY, 13, 14]),
        ("truncate:5", [*A2[-3:], 13, 14]),
        ("truncate:1", [14]),
        (f"truncate:{len(A2) + 5}", [4, 5, 12, *A2, 13, 14]),
    ],
)
def test_context(rule, expected):
    pieces = memory_rule(rule, CODEC).context(TURNS)
    assert np.concatenate([p.ids for p in pieces]).tolist() == expected


@pytest.mark.parametrize("rule", PLAIN)
def test_only_the_last_observation_is_new(rule):
    pieces = memory_rule(rule, CODEC).context(TURNS)
    assert [(p.ids.tolist(), p.source) for p in pieces if p.kind == "observation"] == [([13, 14], 4)]


@pytest.mark.parametrize("rule", PLAIN)
def test_segments_cover_the_prompt(rule):
    prompt, segments = assemble(ids(7, 8), memory_rule(rule, CODEC).context(TURNS))
    assert segments[0] == Segment("prefix", 0, 2)
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert segments[-1].stop == len(prompt)


def test_refresh_retrieves_for_the_summary():
    response = "<think>the river Vel</think><search>length</search>"
    assert memory_rule("refresh", CODEC).query(response, "length") == "length the river Vel"
    assert not hasattr(memory_rule("mem1", CODEC), "query")  # then the agent takes the keywords


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(1, 60),
)
def test_truncate_keeps_the_newest_tokens_of_the_full_history(sizes, limit):
    counter = iter(range(1000))
    said = [(ids(*(next(counter) for _ in range(a))), ids(*(next(counter) for _ in range(o)))) for a, o in sizes]
    turns = [Turn(*pair, call) for call, pair in enumerate(said)]
    full = np.concatenate([p.ids for p in memory_rule("full_response", CODEC).context(turns)])
    kept = np.concatenate([p.ids for p in Truncate(limit).context(turns)])
    assert kept.tolist() == full[-limit:].tolist()


def test_pieces_name_the_call_that_they_came_from():
    sources = {rule: [p.source for p in memory_rule(rule, CODEC).context(TURNS)] for rule in PLAIN}
    assert sources == {
        "mem1": [4, 4], "full_response": [0, 0, 1, 1, 4, 4], "suffix": [4, 4], "summary": [4, 4],
        "window": [1, 1, 4, 4], "refresh": [4, 4], "truncate": [0, 0, 1, 1, 4, 4],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mem2", "memory: 'mem2' is not one of mem1, full_response, .*; write module:name for your own"),
        ("mem1:3", "the memory rule 'mem1' takes no size, got 'mem1:3'"),
        ("window:0", "the size of a memory rule is 1 or more, as in window:3, got 'window:0'"),
        ("window:x", "1 or more, as in window:3, got 'window:x'"),
        ("window:-1", "1 or more, as in window:3, got 'window:-1'"),
    ],
)
def test_unknown_rules(name, line):
    with pytest.raises(ValueError, match=line):
        memory_rule(name, CODEC)
