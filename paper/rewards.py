"""Rewards of the experiments that the library does not have."""

from __future__ import annotations

from collections.abc import Sequence

from memopd.tasks import Task


def nothing(task: Task, responses: Sequence[str]) -> float:
    """No task reward, for the arm that learns from the teacher alone."""
    return 0.0
