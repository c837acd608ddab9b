"""The questions of the embedded world: one-hop, bridge and comparison questions about the entities of one split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

from memopd.tasks.task import Question, Step
from memopd.world.entities import Dice, Entity, Names, Value
from memopd.world.language import KINDS

Fact: TypeAlias = tuple[Entity, Value]

_PER_ENTITY = 2


@dataclass(frozen=True, slots=True)
class Asker:
    """Makes questions. Each maker yields every question of its kind once, in a random order."""

    split: str
    entities: list[Entity]
    wordings: slice
    names: Names
    dice: Dice

    def questions(self, shares: tuple[float, float, float]) -> list[Question]:
        wanted = _PER_ENTITY * len(self.entities)
        makers = zip((self.one_hop(), self.bridge(), self.comparison()), shares, strict=True)
        made = [list(islice(maker, round(wanted * share))) for maker, share in makers]
        # If a small world has too few questions of one kind, there are fewer of the others too, to keep the shares.
        total = min(len(some) / share for some, share in zip(made, shares, strict=True) if share)
        questions = [q for some, share in zip(made, shares, strict=True) for q in some[: round(total * share)]]
        self.dice.shuffle(questions)
        return [replace(q, id=f"world-{self.split}-{i:05d}") for i, q in enumerate(questions)]

    def one_hop(self) -> Iterator[Question]:
        facts = [(e, v, inverse) for e, v in self._facts() for inverse in (False, True)]
        self.dice.shuffle(facts)
        for entity, value, inverse in facts:
            relation = value.relation
            if inverse and relation.inverse:
                text = self._word(relation.inverse).format(o=value.text)
                # Search for the name alone, since it has no passage of its own that would outweigh this one.
                step = replace(_step(entity, value), query=value.text)
                yield from self._unless_given_away("one-hop", text, self.names.aliases(entity), step)
            elif not inverse:
                text = self._word(relation.asks).format(s=self._mention(entity))
                yield from self._unless_given_away("one-hop", text, self._answers(value), _step(entity, value))

    def bridge(self) -> Iterator[Question]:
        pairs = [(e, v, w) for e, v in self._facts() if v.entity for w in v.entity.facts.values()]
        self.dice.shuffle(pairs)
        for entity, first, second in pairs:
            assert first.entity is not None
            phrase = self._word(first.relation.phrases).format(s=self._mention(entity))
            text = self._word(second.relation.asks).format(s=phrase)
            steps = _step(entity, first), _step(first.entity, second)
            yield from self._unless_given_away("bridge", text, self._answers(second), *steps)

    def comparison(self) -> Iterator[Question]:
        answer_first = True  # in every other question, so that neither place is a better guess
        for (a, x), (b, y) in self._rivals():
            if x.size == y.size:
                continue
            more = self.dice.random() < 0.5
            if ((x.size > y.size) == more) != answer_first:
                (a, x), (b, y) = (b, y), (a, x)
            text = self._word(x.relation.more if more else x.relation.less).format(a=a.reference, b=b.reference)
            answers = self.names.aliases(a if answer_first else b)
            yield Question("", text, answers, "comparison", (_step(a, x), _step(b, y)))
            answer_first = not answer_first

    def _rivals(self) -> Iterator[tuple[Fact, Fact]]:
        """All pairs of facts of one relation, each once; every fact occurs before any fact occurs a third time."""
        groups: dict[tuple[str, str], list[Fact]] = {}
        for entity, value in self._facts():
            if value.relation.more:
                groups.setdefault((entity.kind, value.relation.name), []).append((entity, value))
        for group in groups.values():
            self.dice.shuffle(group)
        for distance in range(1, 1 + max(map(len, groups.values())) // 2):
            pairs = []
            for group in groups.values():
                n = len(group)
                starts = n if 2 * distance < n else distance if 2 * distance == n else 0
                pairs += [(group[i], group[(i + distance) % n]) for i in range(starts)]
            self.dice.shuffle(pairs)
            yield from pairs

    def _facts(self) -> list[Fact]:
        return [(e, v) for e in self.entities for v in e.facts.values()]

    def _word(self, wordings: Sequence[str]) -> str:
        return self.dice.pick(wordings[self.wordings])

    def _mention(self, entity: Entity) -> str:
        longer = KINDS[entity.kind].apposition
        return longer.format(entity.name) if longer and self.dice.random() < 0.3 else entity.reference

    def _unless_given_away(self, kind: str, text: str, answers: tuple[str, ...], *steps: Step) -> Iterator[Question]:
        """Skip a question that contains its answer, as when a mayor was born in the town that the question names."""
        words = f" {text.rstrip('?')} "
        if not any(f" {answer} " in words for answer in answers):
            yield Question("", text, answers, kind, steps)

    def _answers(self, value: Value) -> tuple[str, ...]:
        if value.entity:
            return self.names.aliases(value.entity)
        if value.relation.value == "person name":
            surname = value.text.split()[-1]
            return (value.text, surname) if self.names.bearers[surname] == 1 else (value.text,)
        if value.relation.value == "date":
            return _dates(value.text)
        if value.relation.value == "number":
            return _numbers(value)
        return (value.text,)


def _dates(text: str) -> tuple[str, ...]:
    day, month, year = text.split()
    ending = "th" if 11 <= int(day) <= 13 else {"1": "st", "2": "nd", "3": "rd"}.get(day[-1], "th")
    return text, f"{month} {day}, {year}", f"{day}{ending} of {month} {year}", f"the {day}{ending} of {month} {year}"


def _numbers(value: Value) -> tuple[str, ...]:
    units = ("", value.relation.unit, *value.relation.counted)
    forms = [f"{number} {unit}".strip() for number in (f"{value.size:,}", f"{value.size}") for unit in units]
    return tuple(dict.fromkeys([value.text, *forms]))


def _step(entity: Entity, value: Value) -> Step:
    fact = value.relation.fact.format(s=entity.reference, o=value.text)
    return Step(f"{entity.name} {value.relation.keyword}", entity.name, fact)
