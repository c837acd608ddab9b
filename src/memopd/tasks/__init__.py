"""Tasks: questions with their accepted answers, task files, and grading."""

from memopd.tasks.task import Question, Step, Task

__all__ = ["Question", "Step", "Task"]
