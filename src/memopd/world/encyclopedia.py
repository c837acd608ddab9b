"""A small encyclopedia made from a seed, with questions that you can answer only by reading it.

    make_world ── passages ──> WorldPassage   one per entity: a lead and three or four facts
        └── questions ──> {"train" | "dev" | "test": [Question, ...]}  ── tasks(world, k, split) ──> Task

Every entity belongs to one split and is linked only to entities of that split, so training never needs a passage that a
test question needs. Near misses belong to no split: each has the name of another entity with one word changed, and is
linked only to near misses. All splits use the same syllables in their words; they differ in the facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from memopd.tasks.task import Question, Task
from memopd.world.entities import Dice, Entity, Names, Value
from memopd.world.language import KINDS, MONTHS, RELATIONS, WORDINGS, Relation
from memopd.world.questions import Asker

SPLITS = {"train": 0.8, "dev": 0.1, "test": 0.1}
HOPS = ("one-hop", "bridge", "comparison")
SMALLEST, LARGEST = 200, 200_000

_NEAR_MISS = ""  # the split of the near misses
_RELATIONS = {kind: [r for r in RELATIONS if r.kind == kind] for kind in KINDS}
_MONTHS = MONTHS.split()
_PRONOUNS = {"He": "His", "She": "Her", "It": "Its"}


@dataclass(frozen=True, slots=True)
class Difficulty:
    """
    >>> Difficulty(distractors=0.0, wordings=1).hops
    (0.5, 0.3, 0.2)
    """

    distractors: float = 0.25  # share of the passages that are near misses of others
    hops: tuple[float, float, float] = (0.5, 0.3, 0.2)  # shares of one-hop, bridge and comparison questions
    wordings: int = WORDINGS  # how many wordings of each relation are used
    held_out: int = 0  # how many question wordings only dev and test use, and train does not

    def __post_init__(self) -> None:
        if not 0 <= self.distractors <= 0.5:
            raise ValueError(f"Difficulty.distractors must be a share from 0 to 0.5, got {self.distractors!r}")
        if len(self.hops) != len(HOPS) or min(self.hops) < 0 or abs(sum(self.hops) - 1) > 1e-6:
            raise ValueError(f"Difficulty.hops must be three shares that add up to 1, got {self.hops!r}")
        if not 1 <= self.wordings <= WORDINGS:
            raise ValueError(f"Difficulty.wordings must be from 1 to {WORDINGS}, got {self.wordings!r}")
        if not 0 <= self.held_out < self.wordings:
            raise ValueError(
                f"Difficulty.held_out must leave one of {self.wordings} wordings to train on, got {self.held_out!r}"
            )


DEFAULT = Difficulty()


@dataclass(frozen=True, slots=True)
class WorldPassage:
    r"""
    >>> WorldPassage("7", "Velko Works", "Velko Works is a family company.").contents
    '"Velko Works"\nVelko Works is a family company.'
    """

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The format of wiki-18: the title in double quotes, a newline, the text."""
        return f'"{self.title}"\n{self.text}'


@dataclass(frozen=True, slots=True)
class World:
    passages: list[WorldPassage]
    questions: dict[str, list[Question]]  # by split, in the order in which tasks take them
    seed: int
    difficulty: Difficulty


def make_world(passages: int, seed: int, difficulty: Difficulty = DEFAULT) -> World:
    """Make a world. The same arguments give the same world on every machine."""
    if not SMALLEST <= passages <= LARGEST:
        raise ValueError(f"a world has from {SMALLEST:,} to {LARGEST:,} passages, got {passages!r}")
    dice = Dice(seed)
    names = Names(passages, dice)
    entities = _populate(passages, difficulty, names, dice)
    for split in (*SPLITS, _NEAR_MISS):
        _link([e for e in entities if e.split == split], names, dice)
    dice.shuffle(entities)  # otherwise a passage's number would reveal its kind and split
    texts = [_write(entity, difficulty.wordings, dice) for entity in entities]
    return World(
        [WorldPassage(str(i), e.name, text) for i, (e, text) in enumerate(zip(entities, texts, strict=True))],
        {
            split: Asker(
                split, [e for e in entities if e.split == split], _question_wordings(difficulty, split), names, dice
            ).questions(difficulty.hops)
            for split in SPLITS
        },
        seed,
        difficulty,
    )


def tasks(world: World, k: int, split: str) -> list[Task]:
    """Group consecutive questions into tasks of k; drop the remainder."""
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k!r}")
    if split not in world.questions:
        raise ValueError(f"split must be one of {', '.join(world.questions)}, got {split!r}")
    questions = world.questions[split]
    groups = [tuple(questions[i : i + k]) for i in range(0, len(questions) - k + 1, k)]
    return [Task(f"world-{split}-q{k}-{i:05d}", group, source="world") for i, group in enumerate(groups)]


def _populate(passages: int, difficulty: Difficulty, names: Names, dice: Dice) -> list[Entity]:
    near_misses = round(passages * difficulty.distractors)
    left = passages - near_misses
    sizes = {split: max(20, round(left * share)) for split, share in SPLITS.items()}  # 20: some of every kind
    sizes["train"] += left - sum(sizes.values())
    entities = []
    for split, size in sizes.items():
        numbers = {kind: max(2, round(size * KINDS[kind].share)) for kind in KINDS}  # 2: something to compare
        numbers["person"] += size - sum(numbers.values())
        for kind, number in numbers.items():
            entities += [Entity(kind, *names.of(kind), split) for _ in range(number)]
    originals = dice.endless(entities)
    for e in [next(originals) for _ in range(near_misses)]:
        entities.append(Entity(e.kind, *names.of(e.kind, e.stem), _NEAR_MISS))
    return entities


def _link(entities: list[Entity], names: Names, dice: Dice) -> None:
    """Give the entities of one split years and three or four facts each, all within the split."""
    pools = {kind: dice.endless([e for e in entities if e.kind == kind]) for kind in KINDS}
    for kind in KINDS.values():  # people come first: the things that they make are some decades younger
        for entity in entities:
            if KINDS[entity.kind] is kind:
                entity.maker = next(pools["person"], None) if kind.maker else None
                entity.year = entity.maker.year + dice.between(22, 65) if entity.maker else dice.between(*kind.years)
    for entity in entities:
        relations = list(_RELATIONS[entity.kind])
        dice.shuffle(relations)
        values = (_value(entity, relation, pools, names, dice) for relation in relations)
        entity.facts = {v.relation.name: v for v in islice(filter(None, values), dice.between(3, 4))}


def _value(
    entity: Entity, relation: Relation, pools: dict[str, Iterator[Entity]], names: Names, dice: Dice
) -> Value | None:
    if relation.value in KINDS:
        target = entity.maker if relation.name == KINDS[entity.kind].maker else _older(entity, relation, pools)
        return Value(relation, target.reference, entity=target) if target else None
    if relation.value == "person name":
        return Value(relation, names.person())
    if relation.value == "name":
        return Value(relation, names.minor(relation.names))
    if relation.value == "date":
        date = f"{dice.between(1, 28)} {dice.pick(_MONTHS)} {entity.year}"
        return Value(relation, date, entity.year)
    if relation.value == "year":
        return Value(relation, str(entity.year), entity.year)
    number = dice.between(relation.low, relation.high)
    return Value(relation, f"{number:,} {relation.unit}".strip(), number)


def _older(entity: Entity, relation: Relation, pools: dict[str, Iterator[Entity]]) -> Entity | None:
    for target in islice(pools[relation.value], 20):
        if target is not entity and (relation.gap is None or target.year + relation.gap <= entity.year):
            return target
    return None


def _write(entity: Entity, wordings: int, dice: Dice) -> str:
    kind = KINDS[entity.kind]
    name = entity.reference[0].upper() + entity.reference[1:]
    pronoun = dice.pick(("He", "She")) if entity.kind == "person" else "It"
    other = entity.stem if entity.kind == "person" else f"The {kind.noun}"
    sentences = [dice.pick(kind.leads[:wordings]).format(N=name, c=dice.pick(kind.colours))]
    # One fact repeats the name: a passage must contain its name more often than passages that mention it do.
    named = dice.between(0, len(entity.facts) - 1)
    for i, value in enumerate(entity.facts.values()):
        subject = name if i == named else dice.pick((pronoun, pronoun, other))
        says = dice.pick(value.relation.says[:wordings])
        sentences.append(says.format(S=subject, P=_possessive(subject), o=value.text))
    return " ".join(sentences)


def _possessive(subject: str) -> str:
    return _PRONOUNS.get(subject) or subject + ("'" if subject.endswith("s") else "'s")


def _question_wordings(difficulty: Difficulty, split: str) -> slice:
    kept = difficulty.wordings - difficulty.held_out
    return slice(kept) if split == "train" or not difficulty.held_out else slice(kept, difficulty.wordings)
