"""What the embedded world is made of: chance, names, entities and what holds between them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from memopd.world.language import CLOSINGS, KINDS, MIDDLES, OPENINGS, REAL, Relation

_OPENINGS, _MIDDLES, _CLOSINGS = OPENINGS.split(), MIDDLES.split(), CLOSINGS.split()
_T = TypeVar("_T")


class Dice:
    """Chance that falls alike everywhere: `random()` is all that Python promises to keep from version to version."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def between(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def pick(self, items: Sequence[_T]) -> _T:
        return items[int(self.random() * len(items))]

    def shuffle(self, items: list[_T]) -> None:
        for i in range(len(items) - 1, 0, -1):
            j = int(self.random() * (i + 1))
            items[i], items[j] = items[j], items[i]

    def endless(self, items: list[_T]) -> Iterator[_T]:
        """All of them in a random order, again and again: no one turns up much more often than another."""
        while items:
            items = list(items)
            self.shuffle(items)
            yield from items


@dataclass(slots=True, eq=False)
class Entity:
    kind: str
    stem: str  # a person's surname
    name: str
    split: str
    year: int = 0  # when it came to be
    maker: Entity | None = None
    facts: dict[str, Value] = field(default_factory=dict)  # what its passage states, by the relation's name

    @property
    def reference(self) -> str:
        return KINDS[self.kind].reference.format(self.name)


@dataclass(frozen=True, slots=True)
class Value:
    relation: Relation
    text: str  # as it stands in a sentence
    size: int = 0  # of a date, year or number
    entity: Entity | None = None  # what has a passage of its own


class Names:
    """Every full name is given once; the words in it are not."""

    def __init__(self, passages: int, dice: Dice) -> None:
        self.dice = dice
        self.words = self._words()
        given = [f"{next(self.words)} {{}}" for _ in range(min(300, passages // 5))]
        self.styles: dict[str, Sequence[str]] = {kind: KINDS[kind].styles or given for kind in KINDS}
        self.surnames: list[str] = []
        self._shared: set[str] = set()  # stems of two that have a passage
        self.bearers: Counter[str] = Counter()  # of a stem: people, with a passage or without, or things of one kind
        self._taken: set[str] = set()

    def of(self, kind: str, stem: str = "") -> tuple[str, str]:
        """Stem and full name of what has a passage. Only a near miss gets a used stem, once: a search for a name must
        not drown among its like."""
        if not stem:
            stem = next(self.words)
            if kind == "person":
                self.surnames.append(stem)
        else:
            self._shared.add(stem)
        return stem, self._name(self.styles[kind], stem)

    def person(self) -> str:
        """Of somebody without a passage, who often has the surname of one with."""
        stem = self.dice.pick(self.surnames)
        if stem in self._shared or self.dice.random() < 0.4:
            stem = next(self.words)
            self.surnames.append(stem)
        return self._name(self.styles["person"], stem)

    def minor(self, styles: Sequence[str]) -> str:
        """Of a street, a prize, ... called after a surname."""
        while (name := self.dice.pick(styles).format(self.dice.pick(self.surnames))) in self._taken:
            pass
        self._taken.add(name)
        return name

    def _name(self, styles: Sequence[str], stem: str) -> str:
        while (name := self.dice.pick(styles).format(stem)) in self._taken:
            pass
        self._taken.add(name)
        self.bearers[stem] += 1
        return name

    def aliases(self, entity: Entity) -> tuple[str, ...]:
        answers = [entity.name]
        if entity.reference != entity.name:
            answers.append(entity.reference)
        if entity.name.startswith("The "):
            answers.append(entity.name.removeprefix("The "))
        if (entity.kind == "person" or KINDS[entity.kind].short) and self.bearers[entity.stem] == 1:
            answers.append(entity.stem)
        return tuple(answers)

    def _words(self) -> Iterator[str]:
        seen = {word.capitalize() for word in REAL.split()}
        while True:
            middle = self.dice.pick(_MIDDLES) if self.dice.random() < 1 / 3 else ""
            word = self.dice.pick(_OPENINGS).capitalize() + middle + self.dice.pick(_CLOSINGS)
            if word not in seen:
                seen.add(word)
                yield word
