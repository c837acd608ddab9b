"""The score and the cost of one interaction: EM, F1, peak, dependency, time.

Costs are counted on the recorded token ids, so their unit is a token of the model that was called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from memopd.tasks.grading import Grading, grade
from memopd.tasks.task import Task
from memopd.types import Call, Episode, Ids

Decode: TypeAlias = Callable[[Ids], str]


class Scored(Protocol):
    """The score of an answer: a `Grade`, or an environment's `Outcome`."""

    @property
    def em(self) -> float: ...

    @property
    def f1(self) -> float: ...

    @property
    def valid(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Measures:
    """The measures of one episode of one task."""

    task: str
    k: int
    em: float  # Σ over the k questions
    f1: float  # Σ over the k questions
    valid: bool  # there is an answer with one part for each question
    calls: int  # the agent's actions
    peak: int  # the most tokens of any action, prompt included
    peak_without_q: int | None  # as MEM1 counts; None if the actions do not record which part is q
    dependency: int
    seconds: float | None  # wall time of the trajectory; None if not recorded
    dependency_without_q: int | None = None  # as MEM1 counts; results of older versions lack it


def measure(episode: Episode, task: Task, decode: Decode, grading: Grading = "squad") -> Measures:
    """Measure an episode. Only the last action is decoded, since an answer ends the interaction."""
    graded = grade(task.questions, decode(episode.actions[-1].completion), grading)
    return measure_outcome(episode, task, graded)


def measure_outcome(episode: Episode, task: Task, outcome: Scored) -> Measures:
    """Measure an episode that its environment has already graded."""
    if episode.task_id != task.id:
        raise ValueError(f"episode {episode.id!r} is of task {episode.task_id!r}, not of {task.id!r}")
    return Measures(
        task=task.id,
        k=task.k,
        em=outcome.em,
        f1=outcome.f1,
        valid=outcome.valid,
        calls=len(episode.actions),
        peak=peak(episode.actions),
        peak_without_q=peak_without_q(episode.actions),
        dependency=dependency(episode.calls),  # the memory rule's own calls cost as much as any other
        seconds=seconds(episode),
        dependency_without_q=dependency_without_q(episode),
    )


def measure_all(
    episodes: Iterable[Episode], tasks: Iterable[Task], decode: Decode, grading: Grading = "squad"
) -> list[Measures]:
    """Measure every episode. A task without an episode is an error, since ignoring it would bias the mean."""
    by_id = {task.id: task for task in tasks}
    return _complete([measure(e, _task_of(e, by_id), decode, grading) for e in episodes], by_id)


def measure_outcomes(played: Iterable[tuple[Episode, Scored]], tasks: Iterable[Task]) -> list[Measures]:
    """Do the same for episodes that their environment has already graded, as `Agent.graded` yields them."""
    by_id = {task.id: task for task in tasks}
    return _complete([measure_outcome(e, _task_of(e, by_id), outcome) for e, outcome in played], by_id)


def _task_of(episode: Episode, by_id: Mapping[str, Task]) -> Task:
    if episode.task_id not in by_id:
        raise ValueError(
            f"episode {episode.id!r}: there is no task {episode.task_id!r}; give the tasks that were played"
        )
    return by_id[episode.task_id]


def _complete(measures: list[Measures], by_id: Mapping[str, Task]) -> list[Measures]:
    if missing := by_id.keys() - {m.task for m in measures}:
        raise ValueError(f"{len(missing)} of {len(by_id)} tasks have no episode, for example {min(missing)!r}")
    return measures


def peak(calls: Sequence[Call]) -> int:
    """The most tokens in the context of any call: max_t |z_t| + |a_t|."""
    return max(len(call.prompt) + len(call.completion) for call in calls)


def peak_without_q(calls: Sequence[Call]) -> int | None:
    """The same without the stable prefix: max_t |x_t| + |a_t|."""
    prefixes = [_prefix(call) for call in calls]
    if 0 in prefixes:
        return None
    pairs = zip(calls, prefixes, strict=True)
    return max(len(call.prompt) - prefix + len(call.completion) for call, prefix in pairs)


def dependency(calls: Sequence[Call]) -> int:
    """Σ over generated segments s of |s| · (|prefix of s| + ⌊|s| / 2⌋), where s is the completion of one call."""
    lengths = ((len(call.completion), len(call.prompt)) for call in calls)
    return sum(s * (prefix + s // 2) for s, prefix in lengths)


def dependency_without_q(episode: Episode) -> int | None:
    """The same with q left out of every prefix. The memory rule's own calls may have none."""
    if any(_prefix(call) == 0 for call in episode.actions):
        return None
    lengths = ((len(call.completion), len(call.prompt) - _prefix(call)) for call in episode.calls)
    return sum(s * (prefix + s // 2) for s, prefix in lengths)


def seconds(episode: Episode) -> float | None:
    if episode.started is None or episode.ended is None:
        return None
    return episode.ended - episode.started


def _prefix(call: Call) -> int:
    return sum(segment.stop - segment.start for segment in call.segments if segment.kind == "prefix")
