"""Where the agent acts. An `Environment` is three methods on text; your own is one class, named `module:name`.

An environment reads what the agents wrote and says what they read next. Token ids, memory and recording are the
agent's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memopd.agent.protocol import LAST_STOPS, STOPS, Action, Kind, information, read_action, user_message
from memopd.retrieval import Index
from memopd.tasks import Task
from memopd.tasks.grading import Grading, Reward, grade, reward_of


@dataclass(frozen=True, slots=True)
class Progress:
    """One live episode: its task, every response so far, and how its memory rule searches.

    >>> from memopd.tasks import Question
    >>> Progress(Task("t", (Question("0", "Who?", ("Ann",)),)), ("<search>Velm source</search>",)).query("Velm source")
    'Velm source'
    """

    task: Task
    responses: tuple[str, ...]
    query: Callable[[str], str] = str  # what to retrieve where the last response asks for these keywords


@dataclass(frozen=True, slots=True)
class Observation:
    """What an episode reads next. No text: the episode is over."""

    text: str | None
    stop: tuple[str, ...] = ()  # where the next response ends
    reward: float = 0.0  # r_t of the call just made


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an episode was worth. Only the reward is learnt from; the rest is reported."""

    reward: float  # of the task, paid on the last sampled token
    em: float = 0.0  # Σ over questions
    f1: float = 0.0  # Σ over questions
    valid: bool = True  # there was an answer, in the form that was asked for


class Environment(Protocol):
    def start(self, task: Task) -> Observation:
        """The user turn."""
        ...

    def step(self, live: Sequence[Progress]) -> list[Observation]:
        """All live episodes at once, so that one request serves them all."""
        ...

    def grade(self, task: Task, responses: Sequence[str]) -> Outcome: ...


def turns_for(k: int) -> int:
    """Two searches per question, the answer, and one to spare: 6 for two questions, as MEM1 trains."""
    return 2 * k + 2


@dataclass(frozen=True, slots=True)
class SearchEnvironment:
    """k questions over a searchable corpus, by MEM1's protocol."""

    index: Index
    topk: int = 3
    turns: Callable[[int], int] = turns_for
    reward: str | Reward = "em"  # or "f1", or "module:function", or a function of (task, responses)
    grading: Grading = "squad"

    def start(self, task: Task) -> Observation:
        return Observation(user_message(task), self._stops(task, turn=0))

    def step(self, live: Sequence[Progress]) -> list[Observation]:
        actions = [self._action(p) for p in live]
        asked = [i for i, a in enumerate(actions) if a.kind is Kind.SEARCH and a.text]
        queries = [live[i].query(actions[i].text) for i in asked]
        found = dict(zip(asked, self.index.search(queries, self.topk) if queries else [], strict=True))
        return [
            self._observation(p, [(h.passage.title, h.passage.text) for h in found.get(i, [])])
            if actions[i].kind is Kind.SEARCH  # with no keywords: no results
            else Observation(None)
            for i, p in enumerate(live)
        ]

    def grade(self, task: Task, responses: Sequence[str]) -> Outcome:
        last = responses[-1] if responses else ""
        graded = grade(task.questions, last, self.grading)
        reward = reward_of(self.reward, self.grading) if isinstance(self.reward, str) else self.reward
        return Outcome(reward(task, responses), graded.em, graded.f1, graded.valid)

    def _action(self, progress: Progress) -> Action:
        last = len(progress.responses) >= self.turns(progress.task.k)
        return read_action(progress.responses[-1], last)

    def _observation(self, progress: Progress, documents: list[tuple[str, str]]) -> Observation:
        turn = len(progress.responses)
        left = self.turns(progress.task.k) - turn
        return Observation(information(documents, left), self._stops(progress.task, turn))

    def _stops(self, task: Task, turn: int) -> tuple[str, ...]:
        return LAST_STOPS if turn >= self.turns(task.k) - 1 else STOPS
