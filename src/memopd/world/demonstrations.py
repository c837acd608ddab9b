"""The embedded world on disk: corpus, index, tokenizer, tasks, and the oracle's interactions as episode stores.

DIR/corpus.jsonl   DIR/index/   DIR/tokenizer/
DIR/tasks/{train,dev,test}-q{1,2,8,16}.parquet
DIR/oracle/{train,dev}/{mem1,full_response,truncate}/q{1,2,8,16}.parquet
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopd.agent import Agent, repeat
from memopd.agent.parts import build_parts
from memopd.agent.protocol import information, user_message
from memopd.config import TasksConfig
from memopd.files import whole_folder
from memopd.record.store import write_episodes
from memopd.retrieval import Index, Passage, build_index, open_index, write_corpus
from memopd.tasks import Task
from memopd.tasks.files import write_tasks
from memopd.types import Episode, Sampling
from memopd.world.encyclopedia import Difficulty, World, make_world, tasks
from memopd.world.oracle import Oracle
from memopd.world.tokenizer import train_tokenizer

HORIZONS = (1, 2, 8, 16)
RULES = ("mem1", "full_response", "truncate")
SPLITS = ("train", "dev", "test")
DEV_EPISODES = 64  # of each horizon, to measure a loss on
BATCH = 256  # episodes at once
MAX_CONTEXT = 32768  # an oracle's history under full_response is long, and must not be cut

Progress = Callable[[str, Iterable[Any]], Iterable[Any]]


def write_world(
    folder: Path, passages: int, seed: int, difficulty: Difficulty, episodes: int, progress: Progress
) -> World:
    """Write a world to `folder`, atomically, with at most `episodes` demonstrations of each horizon and rule."""
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder}: already exists; choose another folder or remove it")
    world = make_world(passages, seed, difficulty)
    with whole_folder(folder) as partial:
        write_corpus(partial / "corpus.jsonl", (Passage(p.id, p.title, p.text) for p in world.passages))
        build_index(partial / "corpus.jsonl", partial / "index", track=progress)
        tokenizer = train_tokenizer(progress("tokenizer", list(texts_of(world))))
        tokenizer.save_pretrained(partial / "tokenizer")
        asked = {(split, k): tasks(world, k, split) for split in SPLITS for k in HORIZONS}
        for (split, k), some in progress("tasks", list(asked.items())):
            write_tasks(partial / "tasks" / f"{split}-q{k}.parquet", some, user_message)
        index = open_index(partial / "index")
        imitated = [(split, k, rule) for split, k in asked if split != "test" and episodes for rule in RULES]
        for split, k, rule in imitated:  # test tasks are not for training
            some = asked[split, k][: episodes if split == "train" else min(episodes, DEV_EPISODES)]
            made = _Counted(demonstrate(some, index, tokenizer, rule, seed), len(some))
            path = partial / "oracle" / split / rule / f"q{k}.parquet"
            write_episodes(path, progress(f"oracle {split} q{k} {rule}", made))
    return world


def demonstrate(asked: list[Task], index: Index, tokenizer: Any, rule: str, seed: int = 0) -> Iterator[Episode]:
    """The oracle's episodes, in the order of the tasks."""
    environment, memory = build_parts(TasksConfig(memory=rule), tokenizer, index)
    pairs = list(repeat(asked))
    oracle = Oracle(pairs, tokenizer, seed)
    agent = Agent(oracle, environment, memory, tokenizer, Sampling(), BATCH, MAX_CONTEXT, rule)
    for at in range(0, len(pairs), BATCH):
        part = pairs[at : at + BATCH]
        by_id = {e.id: e for e in agent.play(part, seed)}
        yield from (by_id[id] for id, _ in part)


def texts_of(world: World) -> Iterator[str]:
    """Texts like those that a model of this world reads and writes, to train its tokenizer on."""
    for p in world.passages:
        yield information([(p.title, p.text)], 3)
    for asked in tasks(world, 2, "train"):
        yield user_message(asked)
        for n, q in enumerate(asked.questions, 1):
            for step in q.steps:
                yield f"<think>{n}: {step.fact}. Next {n}.</think>\n<search>{step.query}</search>"
        yield (
            f"<think>1: {asked.questions[0].answers[0]}.</think>\n<answer>"
            + "; ".join(q.answers[0] for q in asked.questions)
            + "</answer>"
        )


@dataclass(frozen=True, slots=True)
class _Counted:
    """An iterator with a length, for a progress bar."""

    items: Iterator[Episode]
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Episode]:
        return self.items
