"""What is asked: question sets, k-objective tasks, grading, the embedded world."""

from memopd.tasks.task import Question, Step, Task

__all__ = ["Question", "Step", "Task"]
