"""Hand-worked costs and scores of episodes."""

from dataclasses import replace

import pytest

from memopd.agent import Outcome
from memopd.evaluate import Measures, measure, measure_all, measure_outcomes
from memopd.evaluate.metrics import dependency, dependency_without_q, peak, peak_without_q, seconds
from memopd.tasks import Question, Task
from memopd.types import Call, Episode, Segment

# One id is one character, so that an episode can be written as text.
TASK = Task("t0", (Question("a", "who", ("Oskel", "Tarin Oskel")), Question("b", "when", ("1871",))), "nq")


def decode(ids) -> str:
    return "".join(map(chr, ids))


def call(prompt: str, completion: str, q: int = 0) -> Call:
    segments = (Segment("prefix", 0, q), Segment("memory", q, len(prompt), 0)) if q else ()
    return Call([*map(ord, prompt)], [*map(ord, completion)], segments=segments)


def episode(*calls: Call, id: str = "e0", task: str = "t0", **rest: object) -> Episode:
    return Episode(id, task, calls, **rest)


def test_an_episode_by_hand():
    first = call("q" * 10, "<search>x</search>", q=10)  # 10 + 18
    last = call("q" * 10 + "m" * 25, "<answer>Oskel; 1872</answer>", q=10)  # 35 + 28
    assert measure(episode(first, last, started=100.0, ended=102.5), TASK, decode) == Measures(
        task="t0",
        k=2,
        em=1,
        f1=1,
        valid=True,
        calls=2,
        peak=63,
        peak_without_q=53,
        dependency=18 * (10 + 9) + 28 * (35 + 14),  # 342 + 1372
        seconds=2.5,
        dependency_without_q=18 * (0 + 9) + 28 * (25 + 14),  # 162 + 1092
    )


def test_peak_is_of_one_call_not_of_the_last():
    assert peak([call("q" * 5, "a" * 20), call("q" * 9, "a" * 3)]) == 25
    assert peak([call("q" * 5, "a"), call("q" * 30, "a")]) == 31


def test_peak_without_q_needs_to_know_q_of_every_call():
    assert peak_without_q([call("q" * 5, "a" * 20, q=5), call("q" * 9, "a" * 3, q=5)]) == 20
    assert peak_without_q([call("q" * 5, "a" * 20, q=5), call("q" * 9, "a" * 3)]) is None


def test_dependency_without_q_needs_to_know_q_of_every_action():
    known, unknown = call("q" * 5 + "m" * 4, "a" * 3, q=5), call("q" * 5, "a")
    assert dependency_without_q(episode(known, known)) == 2 * 3 * (4 + 1)
    assert dependency_without_q(episode(known, unknown)) is None
    note = replace(unknown, purpose="note")  # it does not read q: 1 · (5 + 0)
    assert dependency_without_q(episode(known, note)) == 3 * (4 + 1) + 5


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(10, 1)], 10),  # 1 · (10 + 0)
        ([(10, 2)], 22),  # 2 · (10 + 1)
        ([(10, 3)], 33),  # 3 · (10 + 1): half is rounded down
        ([(10, 3), (20, 4)], 33 + 88),
    ],
)
def test_dependency(lengths, expected):
    assert dependency([call("p" * prompt, "a" * sampled) for prompt, sampled in lengths]) == expected


def test_time_is_known_only_where_both_ends_are():
    one = call("q", "a")
    assert seconds(episode(one, started=3.0, ended=10.0)) == 7
    assert seconds(episode(one, started=3.0)) is None
    assert seconds(episode(one, ended=3.0)) is None


def test_gradings_differ():
    got = episode(call("q", "<answer>the Oskel; 1871</answer>"))
    assert (measure(got, TASK, decode).em, measure(got, TASK, decode, "mem1").em) == (2, 1)
    assert measure(got, TASK, decode, "mem1").f1 == pytest.approx(1 + 2 / 3)


def test_an_answer_before_the_last_call_does_not_count():
    got = measure(episode(call("q", "<answer>Oskel; 1871</answer>"), call("q", "and so on")), TASK, decode)
    assert (got.em, got.f1, got.valid) == (0, 0, False)


def test_a_note_costs_but_is_no_turn():
    """The memory's own calls, the last of them after the answer: only what they cost counts."""
    answer = call("q" * 5, "<answer>Oskel; 1871</answer>", q=5)  # 5 + 28
    note = replace(call("n" * 90, "a note"), purpose="note")
    got = measure(episode(note, answer, note), TASK, decode)
    assert (got.em, got.calls, got.peak, got.peak_without_q) == (2, 1, 33, 28)
    assert got.dependency == 28 * (5 + 14) + 2 * 6 * (90 + 3)
    assert got.dependency_without_q == 28 * (0 + 14) + 2 * 6 * (90 + 3)
    named = measure(episode(note, replace(answer, purpose="answer")), TASK, decode)  # every call has a purpose: all act
    assert (named.em, named.calls, named.peak) == (2, 2, 96)


def test_an_environments_own_grades():
    got = measure_outcomes([(episode(call("q", "no tags")), Outcome(7.0, em=0.5, f1=0.75))], [TASK])
    assert [(m.em, m.f1, m.valid, m.calls) for m in got] == [(0.5, 0.75, True, 1)]
    with pytest.raises(ValueError, match="1 of 1 tasks have no episode"):
        measure_outcomes([], [TASK])


def test_an_episode_is_measured_against_its_own_task():
    with pytest.raises(ValueError, match="episode 'e0' is of task 't1', not of 't0'"):
        measure(episode(call("q", "a"), task="t1"), TASK, decode)


def test_every_task_must_have_been_tried():
    other = Task("t1", TASK.questions, "nq")
    good = call("q", "<answer>Oskel; 1871</answer>")
    episodes = [episode(good, id="e0"), episode(call("q", "a"), id="e1"), episode(good, id="e2", task="t1")]
    assert [m.em for m in measure_all(episodes, [TASK, other], decode)] == [2, 0, 2]
    with pytest.raises(ValueError, match="1 of 2 tasks have no episode, for example 't1'"):
        measure_all(episodes[:2], [TASK, other], decode)
    with pytest.raises(ValueError, match="episode 'e2': there is no task 't1'"):
        measure_all(episodes, [TASK], decode)
