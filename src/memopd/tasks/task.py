"""Questions with their accepted answers, grouped into tasks of k.

Task ── questions ──> Question ── answers  the aliases of one answer
                         ├── supporting  the ids of its gold passages
                         └── steps ──> Step  how the oracle finds it (the embedded world only)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One search on the way to an answer.

    >>> Step("Velmora Works founder", "Velmora Works", "Velmora Works was founded by Tarin Oskel").title
    'Velmora Works'
    """

    query: str  # a search for this finds the passage
    title: str  # the title of the passage that contains the fact
    fact: str  # the one short clause to remember, which the passage states or implies


@dataclass(frozen=True, slots=True)
class Question:
    """
    >>> Question("nq-0", "who founded velmora works", ("Tarin Oskel",)).answers
    ('Tarin Oskel',)
    """

    id: str
    text: str
    answers: tuple[str, ...]  # aliases: any of them is correct; the oracle gives the first
    kind: str = ""  # "one-hop", "bridge", "comparison" where known
    steps: tuple[Step, ...] = ()
    supporting: tuple[str, ...] = ()  # ids of the passages that one must read to answer, where known

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError(f"question {self.id!r}: text: must not be empty")
        if not self.answers or not all(isinstance(a, str) for a in self.answers):
            raise ValueError(f"question {self.id!r}: answers: must be one or more strings, got {self.answers!r}")


@dataclass(frozen=True, slots=True)
class Task:
    """k questions that are asked together.

    >>> Task("t0", (Question("nq-0", "who founded velmora works", ("Tarin Oskel",)),)).k
    1
    """

    id: str
    questions: tuple[Question, ...]
    source: str = ""  # the data set; a task never mixes two

    def __post_init__(self) -> None:
        if not self.questions:
            raise ValueError(f"task {self.id!r}: questions: must not be empty")

    @property
    def k(self) -> int:
        return len(self.questions)
