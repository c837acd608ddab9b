"""What a call read, what it had lost, what a flattened history would have said: against sets worked out by hand."""

import numpy as np
import pytest

from memopd.agent.codec import Codec
from memopd.agent.memory import Turn, assemble, memory_rule
from memopd.report.contexts import contexts, flatten, unchanged
from memopd.types import Call, Episode, Segment, StopReason

Q, A, SEEN = [1, 2], [[10, 11, 12], [30, 31, 32], [50, 51]], [[20], [40, 41]]
FLAT = [1, 2, 10, 11, 12, 20, 30, 31, 32, 40, 41, 50, 51]
WORDS = Codec(
    encode=lambda text: np.array([90 + sum(map(ord, text)) % 7, 99], np.int32),
    decode=lambda ids: "<think>" + " ".join(map(str, ids)) + "</think>",
)


def episode(rule: str, segments: bool = True) -> Episode:
    """The same three turns under a memory rule."""
    memory, turns, calls = memory_rule(rule, WORDS), [], []
    for t in range(3):
        pieces = memory.context(turns) if turns else []
        prompt, spans = assemble(np.array(Q, np.int32), pieces)
        calls.append(Call(prompt, A[t], segments=spans if segments else ()))
        if t < 2:
            turns.append(Turn(np.array(A[t], np.int32), np.array(SEEN[t], np.int32), t))
    return Episode("e", "t", calls)


def shown(pieces):
    return [(p.kind, p.source, p.ids.tolist(), p.flat, p.at) for p in pieces]


@pytest.mark.parametrize("segments", [True, False])
def test_mem1(segments):
    history, (first, second, third) = contexts(episode("mem1", segments))
    assert history.ids.tolist() == FLAT
    assert history.begin == (2, 6, 11)
    assert shown(first.read) == [("prefix" if segments else "context", None, Q, 0, 0)]
    assert not first.dropped
    assert (first.same, first.moved) == (2, 0)
    source = 0 if segments else None  # nobody said whose response it is
    assert shown(second.read)[1:] == [("memory", source, A[0], 2, 2), ("observation", 0, SEEN[0], 5, 5)]
    assert not second.dropped
    assert (second.same, second.moved) == (6, 0)
    source = 1 if segments else None
    assert shown(third.read)[1:] == [("memory", source, A[1], 6, 2), ("observation", 1, SEEN[1], 9, 5)]
    assert [s[2:] for s in shown(third.dropped)] == [(A[0], 2, None), (SEEN[0], 5, None)]
    assert shown(third.flattened) == [
        ("prefix", None, Q, 0, 0),
        ("response", 0, A[0], 2, None),
        ("observation", 0, SEEN[0], 5, None),
        ("response", 1, A[1], 6, 2),
        ("observation", 1, SEEN[1], 9, 5),
    ]
    assert (third.same, third.moved) == (2, 5)


def test_append_only_loses_nothing_and_flattening_is_right():
    _, calls = contexts(episode("full_response"))
    for call in calls:
        assert not call.dropped
        assert call.moved == 0
        assert [i for p in call.flattened for i in p.ids] == [i for p in call.read for i in p.ids]


def test_a_suffix_splits_the_response_it_came_from():
    _, (_, second, third) = contexts(episode("suffix:2"))
    assert shown(second.read)[1:] == [("memory", 0, A[0][1:], 3, 2), ("observation", 0, SEEN[0], 5, 4)]
    assert shown(second.dropped) == [("response", 0, A[0][:1], 2, None)]
    assert shown(second.flattened)[1:3] == [("response", 0, A[0][:1], 2, None), ("response", 0, A[0][1:], 3, 2)]
    assert [p.ids.tolist() for p in third.dropped] == [A[0][1:], SEEN[0], A[1][:1]]


def test_what_was_encoded_anew_is_nowhere_in_the_history():
    _, (_, second, third) = contexts(episode("summary"))
    assert second.read[1].kind == "memory"
    assert second.read[1].flat is None
    assert [(p.kind, p.at) for p in second.flattened] == [("prefix", 0), ("response", None), ("observation", 4)]
    assert any(p.flat is None for p in third.dropped)  # the first summary


def test_pieces_of_a_prompt_are_the_prompt():
    for rule in ("mem1", "full_response", "suffix:2", "summary", "window:1", "refresh", "truncate:4"):
        made = episode(rule)
        history, calls = contexts(made)
        for t, (call, known) in enumerate(zip(made.calls, calls, strict=True)):
            assert np.concatenate([p.ids for p in known.read]).tolist() == call.prompt.tolist()
            flat = np.concatenate([p.ids for p in known.flattened])
            assert flat.tolist() == history.ids[: history.begin[t]].tolist()
            for piece in (*known.read, *known.flattened, *known.dropped):
                if piece.flat is not None:
                    assert history.ids[piece.flat : piece.flat + len(piece.ids)].tolist() == piece.ids.tolist()
                if piece.at is not None:
                    assert call.prompt[piece.at : piece.at + len(piece.ids)].tolist() == piece.ids.tolist()


def test_what_an_earlier_call_read_or_wrote_is_unchanged():
    """Instructions of 20 ids; a response of 30; then an observation of 25 that a later call reads again elsewhere."""
    q, a, o, note = (np.arange(start, start + n) for start, n in ((0, 20), (100, 30), (200, 25), (300, 18)))
    second = np.concatenate([q, a, o])
    third = np.concatenate([q, [7, 8], o, note])
    fourth = np.concatenate([o, note, q[:10]])
    calls = [Call(q, a), Call(second, [5]), Call(third, [6]), Call(fourth, [9])]
    assert unchanged(Episode("e", "t", calls)) == [(), ((0, 50),), ((0, 20), (22, 47)), ((0, 43),)]
    calls[1] = Call(np.where(second == 10, 99, second), [5])  # one id of the instructions is another
    assert unchanged(Episode("e", "t", calls))[1] == ((11, 50),)


def test_ids_are_not_found_between_two_ids():
    """The bytes of 256 also stand across those of 2 ** 24 and 0."""
    segments = [Segment("prefix", 0, 1), Segment("memory", 1, 2, 0)]
    calls = [Call([7], [1 << 24, 0]), Call([7, 256], [9], segments=segments)]
    _, (_, second) = contexts(Episode("e", "t", calls))
    assert [p.flat for p in second.read] == [0, None]


def test_every_call_is_part_of_the_history():
    made = episode("mem1")
    helper = Call(made.calls[1].prompt, A[1], stop=StopReason.ABORTED, segments=made.calls[1].segments)
    assert not helper.trainable
    assert flatten(Episode("e", "t", [made.calls[0], helper, made.calls[2]])).ids.tolist() == FLAT
