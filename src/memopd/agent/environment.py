"""Environments, in which the agent acts. An `Environment` has three methods on text; your own is one class, which you
name as `module:name`.

An environment reads the agents' responses and returns the text that they read next. The agent takes care of token ids,
memory and recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from memopd.agent.protocol import (
    INSTRUCTIONS,
    LAST_STOPS,
    QUESTIONS,
    STOPS,
    Action,
    Kind,
    information,
    read_action,
    user_message,
)
from memopd.retrieval import Index
from memopd.tasks import Task
from memopd.tasks.grading import Grading, Reward, grade, reward_of


@dataclass(frozen=True, slots=True)
class Progress:
    """One live episode: its task, all responses so far, and the query of its memory rule.

    >>> from memopd.tasks import Question
    >>> Progress(Task("t", (Question("0", "Who?", ("Ann",)),)), ("<search>Velm source</search>",)).query("Velm source")
    'Velm source'
    """

    task: Task
    responses: tuple[str, ...]
    query: Callable[[str], str] = str  # from the keywords of the last response to the query for retrieval


@dataclass(frozen=True, slots=True)
class Observation:
    """The text that an episode reads next. Without text, the episode is over."""

    text: str | None
    stop: tuple[str, ...] = ()  # the strings that end the next response
    reward: float = 0.0  # r_t of the last call


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an episode. Training uses only the reward; the rest is for reports."""

    reward: float  # of the task, assigned to the last sampled token
    em: float = 0.0  # Σ over questions
    f1: float = 0.0  # Σ over questions
    valid: bool = True  # the agent answered in the required form


class Environment(Protocol):
    def start(self, task: Task) -> Observation:
        """The user turn of a task."""
        ...

    def step(self, live: Sequence[Progress]) -> list[Observation]:
        """The next observation of every episode whose call has ended. Those that ended together come at once, so that
        one request can serve all of them."""
        ...

    def grade(self, task: Task, responses: Sequence[str]) -> Outcome: ...


def turns_for(k: int) -> int:
    """Two searches per question, the answer, and one spare turn: 6 for two questions, as in MEM1's training.

    MEM1's code has 6 turns for any number of questions.
    """
    return 2 * k + 2


@dataclass(frozen=True, slots=True)
class SearchEnvironment:
    """k questions over a searchable corpus, with MEM1's protocol."""

    index: Index
    topk: int = 3
    turns: int = 0  # the most turns per episode; 0: `turns_for` the number of questions
    reward: str | Reward = "em"  # or another of REWARDS, or "module:function", or a function of (task, responses)
    grading: Grading = "squad"
    prompt: str = INSTRUCTIONS + QUESTIONS  # the user turn, with a place for the questions

    def start(self, task: Task) -> Observation:
        return Observation(user_message(task, self.prompt), self._stops(task, turn=0))

    def step(self, live: Sequence[Progress]) -> list[Observation]:
        actions = [self._action(p) for p in live]
        asked = [i for i, a in enumerate(actions) if a.kind is Kind.SEARCH and a.text]
        queries = [live[i].query(actions[i].text) for i in asked]
        found = dict(zip(asked, self.index.search(queries, self.topk) if queries else [], strict=True))
        return [
            self._observation(p, [(h.passage.title, h.passage.text) for h in found.get(i, [])])
            if actions[i].kind is Kind.SEARCH  # a search without keywords has no results
            else Observation(None)
            for i, p in enumerate(live)
        ]

    def grade(self, task: Task, responses: Sequence[str]) -> Outcome:
        last = responses[-1] if responses else ""
        graded = grade(task.questions, last, self.grading)
        reward = reward_of(self.reward, self.grading) if isinstance(self.reward, str) else self.reward
        return Outcome(reward(task, responses), graded.em, graded.f1, graded.valid)

    def _action(self, progress: Progress) -> Action:
        last = len(progress.responses) >= self._turns(progress.task)
        return read_action(progress.responses[-1], last)

    def _observation(self, progress: Progress, documents: list[tuple[str, str]]) -> Observation:
        turn = len(progress.responses)
        left = self._turns(progress.task) - turn
        return Observation(information(documents, left), self._stops(progress.task, turn))

    def _stops(self, task: Task, turn: int) -> tuple[str, ...]:
        return LAST_STOPS if turn >= self._turns(task) - 1 else STOPS

    def _turns(self, task: Task) -> int:
        return self.turns or turns_for(task.k)
