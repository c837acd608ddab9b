"""Scripted policies: the oracle, which solves the embedded world's tasks, and a guesser, which never searches.

The oracle is an engine whose completions are scripted, not sampled. It searches the real index and uses only what the
retrieved documents say: it notes a fact when it has found the passage that contains it. SFT trains a model on its
responses, so their wording varies from episode to episode.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memopd.agent.protocol import documents_of
from memopd.engine.protocol import Completion, Request
from memopd.tasks import Question, Task
from memopd.types import StopReason

CARELESS = 0.25  # how often a careless oracle misreads a document
TRIES = 2  # searches for one fact before the oracle gives up

OPENINGS = ("", "", "", "Known so far. ", "Summary. ", "Notes. ")
ANSWERED = ("{n}: {answer}.", "{n}: {answer}.", "{n} is {answer}.", "{n} done, {answer}.")
PARTLY = ("{n}: {facts}, not finished.", "{n} so far: {facts}.", "{n}: {facts}.")
NEXT = ("Next {n}.", "Now {n}.", "Next question {n}.", "Looking for {n}.")
GIVEN_UP = "unknown"


@dataclass(slots=True)
class _Notes:
    """The oracle's notes of one episode."""

    task: Task
    random: random.Random
    answers: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)  # of the current question
    step: int = 0
    tries: int = 0
    style: tuple[str, str, str, str] = ("", "", "", "")

    @property
    def question(self) -> Question | None:
        return self.task.questions[len(self.answers)] if len(self.answers) < self.task.k else None

    def answer(self, answer: str) -> None:
        self.answers.append(answer)
        self.facts, self.step, self.tries = [], 0, 0


class Oracle:
    """Solves tasks whose questions have `steps`, with MEM1's protocol, under any memory rule.

    With probability `misreads` it takes the title of a retrieved document for the answer and continues with the next
    question, so that it follows the protocol but is wrong.
    """

    def __init__(self, tasks: Iterable[tuple[str, Task]], tokenizer: Any, seed: int = 0, misreads: float = 0.0) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.misreads = misreads
        self.tasks = dict(tasks)
        self.notes: dict[str, _Notes] = {}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        notes = self.notes.get(request.episode) or self._begin(request.episode)
        if request.purpose:  # a call of the memory rule: the episode continues, and any true text will do
            return self._written(self._summary(notes))
        if notes.tries:
            self._read(notes, documents_of(self.tokenizer.decode(request.prompt.tolist())))
        text = self._response(notes, last="</search>" not in request.stop)
        if notes.question is None or "</search>" not in request.stop:
            del self.notes[request.episode]
        return self._written(text)

    def _written(self, text: str) -> Completion:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Completion(np.asarray(ids, np.int32), None, StopReason.STOP)

    def _begin(self, episode: str) -> _Notes:
        task = self.tasks[episode]
        if unsolved := [q.id for q in task.questions if not q.steps]:
            raise ValueError(f"task {task.id!r}: the oracle cannot solve question {unsolved[0]!r}, which has no steps")
        dice = random.Random(f"{self.seed}/{episode}")
        style = tuple(dice.choice(options) for options in (OPENINGS, ANSWERED, PARTLY, NEXT))
        notes = _Notes(task, dice, style=style)  # type: ignore[arg-type]
        self.notes[episode] = notes
        return notes

    def _read(self, notes: _Notes, documents: Sequence[tuple[str, str]]) -> None:
        question = notes.question
        assert question is not None
        step = question.steps[notes.step]
        if self.misreads and documents and notes.random.random() < self.misreads:
            notes.answer(notes.random.choice(documents)[0])
        elif any(title == step.title for title, _ in documents):
            notes.facts.append(step.fact)
            notes.step, notes.tries = notes.step + 1, 0
            if notes.step == len(question.steps):
                notes.answer(question.answers[0])
        elif notes.tries >= TRIES:
            notes.answer(GIVEN_UP)

    def _response(self, notes: _Notes, last: bool) -> str:
        summary = self._summary(notes)
        if (question := notes.question) is None or last:
            answers = notes.answers + [GIVEN_UP] * (notes.task.k - len(notes.answers))
            return f"<think>{summary}</think>\n<answer>{'; '.join(answers)}</answer>"
        step = question.steps[notes.step]
        query = step.query if notes.tries == 0 else step.title  # the second time, only the name
        notes.tries += 1
        return f"<think>{summary}</think>\n<search>{query}</search>"

    def _summary(self, notes: _Notes) -> str:
        opening, answered, partly, upcoming = notes.style
        parts = [answered.format(n=n, answer=a) for n, a in enumerate(notes.answers, 1)]
        if notes.question is not None:
            n = len(notes.answers) + 1
            parts += [partly.format(n=n, facts="; ".join(notes.facts))] if notes.facts else []
            parts += [upcoming.format(n=n)]
        return opening + " ".join(parts)


class Guesser:
    """Answers at once, without searching: with the answer of the most similar training question, or with the first
    of the things that are compared."""

    def __init__(self, tasks: Iterable[tuple[str, Task]], tokenizer: Any, training: Iterable[Question]) -> None:
        self.tokenizer = tokenizer
        self.tasks = dict(tasks)
        self.known = [(frozenset(q.text.lower().split()), q.answers[0]) for q in training if q.kind != "comparison"]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._completion(self.tasks[request.episode]) for request in requests]

    def _completion(self, task: Task) -> Completion:
        text = f"<think>I do not search.</think>\n<answer>{'; '.join(map(self._guess, task.questions))}</answer>"
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Completion(np.asarray(ids, np.int32), None, StopReason.STOP)

    def _guess(self, question: Question) -> str:
        if question.kind == "comparison" and question.steps:
            return min((s.title for s in question.steps), key=question.text.find)
        words = frozenset(question.text.lower().split())
        return max(self.known, key=lambda known: len(words & known[0]) / len(words | known[0]), default=("", ""))[1]
