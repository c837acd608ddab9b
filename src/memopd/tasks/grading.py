"""Grading: exact match and F1 after normalisation, and the reward of an interaction.

    response ── answers_of ──> answers ── grade ──> Grade ── per_question ──> Score

There are two gradings. `squad`, the default, normalises as SQuAD does and counts tokens as a bag. `mem1` follows MEM1's
evaluation: it keeps articles, replaces punctuation by a space, and counts tokens as a set.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from memopd.names import resolve, takes
from memopd.tasks.task import Question, Task

Grading: TypeAlias = Literal["squad", "mem1"]
Reward: TypeAlias = Callable[[Task, Sequence[str]], float]  # the task and the agent's responses, in order

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DROP = str.maketrans("", "", string.punctuation)
_SPACE = str.maketrans(string.punctuation, " " * len(string.punctuation))
_OPEN, _CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one answer, given the aliases of its question."""

    em: float  # 0 or 1
    f1: float


@dataclass(frozen=True, slots=True)
class Grade:
    """
    >>> asked = (Question("0", "who", ("Tarin Oskel",)), Question("1", "where", ("the Velm", "Velm river")))
    >>> got = grade(asked, "<answer>Tarin Oskel; the river Velm</answer>")
    >>> got.em, got.f1, got.answers
    (1.0, 2.0, ('Tarin Oskel', 'the river Velm'))
    """

    em: float  # Σ over questions
    f1: float  # Σ over questions
    answers: tuple[str, ...] | None  # None if there is no closed <answer>
    per_question: tuple[Score, ...]  # one per question; all 0 if the number of answers is wrong

    @property
    def valid(self) -> bool:
        """Whether there is an answer with one part for each question."""
        return self.answers is not None and len(self.answers) == len(self.per_question)


def normalise(text: str) -> str:
    """Normalise as SQuAD does: lower case, no punctuation, no articles, single spaces.

    We compose characters first (NFC), so that two encodings of a text compare equal. SQuAD's own script does not, and
    takes the a of a decomposed "à" for an article.

    >>> normalise("The  Velmora-Works, Inc.")
    'velmoraworks inc'
    """
    return _single_spaces(_ARTICLES.sub(" ", _lower(text).translate(_DROP)))


def exact_match(answer: str, aliases: Sequence[str], grading: Grading = "squad") -> float:
    key = _key(answer, grading)
    return float(key != "" and any(key == _key(alias, grading) for alias in aliases))


def f1(answer: str, aliases: Sequence[str], grading: Grading = "squad") -> float:
    """The maximum over the aliases of 2·|common tokens| / (|answer's tokens| + |alias's tokens|)."""
    given = _tokens(answer, grading)
    return max((_overlap(given, _tokens(alias, grading)) for alias in aliases), default=0.0)


def answers_of(response: str) -> tuple[str, ...] | None:
    """The parts of the last closed `<answer>`, split on `;`, or None if there is none.

    >>> answers_of("<think>so</think><answer>Tarin Oskel; 1871</answer>")
    ('Tarin Oskel', '1871')
    """
    start = response.rfind(_OPEN, 0, max(response.rfind(_CLOSE), 0))
    if start < 0:
        return None
    inside = response[start + len(_OPEN) : response.find(_CLOSE, start)]
    return tuple(part.strip() for part in inside.split(";"))


def grade(questions: Sequence[Question], response: str, grading: Grading = "squad") -> Grade:
    """Grade a response. If it has more or fewer answers than questions, all of them score 0."""
    answers = answers_of(response)
    if answers is None or len(answers) != len(questions):
        _check(grading)
        return Grade(0.0, 0.0, answers, (Score(0.0, 0.0),) * len(questions))
    scores = tuple(
        Score(exact_match(answer, question.answers, grading), f1(answer, question.answers, grading))
        for question, answer in zip(questions, answers, strict=True)
    )
    return Grade(sum(s.em for s in scores), sum(s.f1 for s in scores), answers, scores)


def reward_of(name: str = "em", grading: Grading = "squad", setting: str = "tasks.reward") -> Reward:
    """Return the reward called `em` (Σ EM), `f1` (Σ F1) or `em_partial`, or a user's `module:function` of (task,
    responses)."""
    _check(grading)
    function = resolve(setting, name, REWARDS)
    if name in REWARDS:
        return lambda task, responses: function(task.questions, _last(responses), grading)
    if isinstance(function, type) or not takes(function, 2):
        raise ValueError(f"{setting}: {name!r} must be a function of (task, responses)")

    def reward(task: Task, responses: Sequence[str]) -> float:
        given = function(task, responses)
        try:
            value = float(given)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"{setting}: {name!r} must return a finite number, got {given!r} for task {task.id!r}")
        return value

    return reward


def em_partial(questions: Sequence[Question], response: str) -> float:
    """MEM1's reward in training: Σ EM over the answers that are there, even if they are too few or too many.

    The n-th answer is compared with the n-th question. Its training normalises as SQuAD does, unlike its evaluation.

    >>> asked = (Question("0", "who", ("Oskel",)), Question("1", "where", ("Velm",)))
    >>> em_partial(asked, "<answer>Oskel</answer>"), em_partial(asked, "<answer>the Oskel; Velm; 1871</answer>")
    (1.0, 2.0)
    """
    pairs = zip(questions, answers_of(response) or (), strict=False)
    return float(sum(exact_match(answer, question.answers) for question, answer in pairs))


# A reward is a function of the questions, the response that ended the interaction, and the grading.
REWARDS: dict[str, Callable[[Sequence[Question], str, Grading], float]] = {
    "em": lambda questions, response, grading: grade(questions, response, grading).em,
    "f1": lambda questions, response, grading: grade(questions, response, grading).f1,
    "em_partial": lambda questions, response, grading: em_partial(questions, response),
}


def _last(responses: Sequence[str]) -> str:
    return responses[-1] if responses else ""  # only the response that ended the interaction can answer


def _key(text: str, grading: Grading) -> str:
    """The text that exact match compares.

    If normalisation leaves nothing (the band "The The", the grade "A", the title "?"), we compare the words or signs
    themselves: SQuAD's script would consider all of these, and an empty answer, equal.
    """
    _check(grading)
    if grading == "mem1":
        return _single_spaces(_lower(text).translate(_SPACE)) or _single_spaces(_lower(text))
    return normalise(text) or _single_spaces(_lower(text).translate(_DROP)) or _single_spaces(_lower(text))


def _tokens(text: str, grading: Grading) -> Counter[str]:
    tokens = _key(text, grading).split()
    return Counter(set(tokens) if grading == "mem1" else tokens)


def _overlap(a: Counter[str], b: Counter[str]) -> float:
    common = (a & b).total()
    return 2 * common / (a.total() + b.total()) if common else 0.0


def _lower(text: str) -> str:
    return unicodedata.normalize("NFC", text).lower()


def _single_spaces(text: str) -> str:
    return " ".join(text.split())


def _check(grading: Grading) -> None:
    if grading not in get_args(Grading):
        raise ValueError(f"grading must be squad or mem1, got {grading!r}")
