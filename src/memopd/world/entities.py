"""The parts of the embedded world: random numbers, names, entities and their facts."""

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
    """Random numbers that are the same everywhere: of `random`, Python guarantees only `random()` across versions."""

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
        """Repeat all items forever, each time in a random order, so that all occur about equally often."""
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
    year: int = 0  # of its birth, founding or making
    maker: Entity | None = None
    facts: dict[str, Value] = field(default_factory=dict)  # the facts that its passage states, by the relation's name

    @property
    def reference(self) -> str:
        return KINDS[self.kind].reference.format(self.name)


@dataclass(frozen=True, slots=True)
class Value:
    relation: Relation
    text: str  # as it stands in a sentence
    size: int = 0  # of a date, year or number
    entity: Entity | None = None  # the entity, if it has its own passage


class Names:
    """Gives out names. A full name is used once; the words in it may be used again."""

    def __init__(self, passages: int, dice: Dice) -> None:
        self.dice = dice
        self.words = self._words()
        given = [f"{next(self.words)} {{}}" for _ in range(min(300, passages // 5))]
        self.styles: dict[str, Sequence[str]] = {kind: KINDS[kind].styles or given for kind in KINDS}
        self.surnames: list[str] = []
        self._shared: set[str] = set()  # stems that two entities with a passage share
        self.bearers: Counter[str] = Counter()  # people or things with a stem, with or without a passage
        self._taken: set[str] = set()

    def of(self, kind: str, stem: str = "") -> tuple[str, str]:
        """The stem and full name of an entity with a passage. Only a near miss gets a used stem, once, so that a search
        for a name still finds it."""
        if not stem:
            stem = next(self.words)
            if kind == "person":
                self.surnames.append(stem)
        else:
            self._shared.add(stem)
        return stem, self._name(self.styles[kind], stem)

    def person(self) -> str:
        """The name of a person without a passage, often with the surname of one who has a passage."""
        stem = self.dice.pick(self.surnames)
        if stem in self._shared or self.dice.random() < 0.4:
            stem = next(self.words)
            self.surnames.append(stem)
        return self._name(self.styles["person"], stem)

    def minor(self, styles: Sequence[str]) -> str:
        """The name of a street, a prize, ... that contains a surname."""
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
