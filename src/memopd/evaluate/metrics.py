"""What one interaction is worth and what it cost: EM, F1, peak, dependency, time.

Costs come from the recorded token ids, so they are in the tokens of the model that was called, whatever it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from memopd.tasks.grading import Grading, grade
from memopd.tasks.task import Task
from memopd.types import Call, Episode, Ids

Decode: TypeAlias = Callable[[Ids], str]


@dataclass(frozen=True, slots=True)
class Measures:
    """One episode of one task."""

    task: str
    k: int
    em: float  # Σ over the k questions
    f1: float  # Σ over the k questions
    valid: bool  # there was an answer, with one part for each question
    calls: int
    peak: int  # tokens
    peak_without_q: int | None  # as MEM1 reports it; None where the calls do not say which part is q
    dependency: int
    seconds: float | None  # wall, of the trajectory; None where not recorded


def measure(episode: Episode, task: Task, decode: Decode, grading: Grading = "squad") -> Measures:
    """Only the last call is decoded: an answer ends the interaction."""
    if episode.task_id != task.id:
        raise ValueError(f"episode {episode.id!r} is of task {episode.task_id!r}, not of {task.id!r}")
    calls = episode.calls
    graded = grade(task.questions, decode(calls[-1].completion), grading)
    return Measures(
        task=task.id,
        k=task.k,
        em=graded.em,
        f1=graded.f1,
        valid=graded.valid,
        calls=len(calls),
        peak=peak(calls),
        peak_without_q=peak_without_q(calls),
        dependency=dependency(calls),
        seconds=seconds(episode),
    )


def measure_all(
    episodes: Iterable[Episode], tasks: Iterable[Task], decode: Decode, grading: Grading = "squad"
) -> list[Measures]:
    """Every episode with its task. A task that nobody attempted is an error: leaving it out would flatter."""
    by_id = {task.id: task for task in tasks}
    measures = []
    for episode in episodes:
        if episode.task_id not in by_id:
            raise ValueError(f"episode {episode.id!r}: there is no task {episode.task_id!r}; give the tasks it was of")
        measures.append(measure(episode, by_id[episode.task_id], decode, grading))
    if missing := by_id.keys() - {m.task for m in measures}:
        raise ValueError(f"{len(missing)} of {len(by_id)} tasks have no episode, {min(missing)!r} for one")
    return measures


def peak(calls: Sequence[Call]) -> int:
    """The most tokens in the context of any one call: max_t |z_t| + |a_t|."""
    return max(len(call.prompt) + len(call.completion) for call in calls)


def peak_without_q(calls: Sequence[Call]) -> int | None:
    """The same without the stable prefix: max_t |x_t| + |a_t|."""
    prefixes = [_prefix(call) for call in calls]
    if 0 in prefixes:
        return None
    pairs = zip(calls, prefixes, strict=True)
    return max(len(call.prompt) - prefix + len(call.completion) for call, prefix in pairs)


def dependency(calls: Sequence[Call]) -> int:
    """Σ over generated segments s of |s| · (|prefix of s| + ⌊|s| / 2⌋), a segment being what one call sampled."""
    lengths = ((len(call.completion), len(call.prompt)) for call in calls)
    return sum(s * (prefix + s // 2) for s, prefix in lengths)


def seconds(episode: Episode) -> float | None:
    if episode.started is None or episode.ended is None:
        return None
    return episode.ended - episode.started


def _prefix(call: Call) -> int:
    return sum(segment.stop - segment.start for segment in call.segments if segment.kind == "prefix")
