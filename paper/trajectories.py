"""The trajectories that a model samples under each context-update rule, stored so that all experiments share them.

WORK/trajectories/mem1-0a1b2c3d4e5f/    episodes.parquet, settings.json; the name contains a digest of the settings

`replayed` shows the same actions to another rule: the contexts that it would have made of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from memopd.cli.options import Precision, load_model, policy_name
from memopd.engine.protocol import Completion, Request
from memopd.evaluate.provenance import content_digest
from memopd.files import whole_folder
from memopd.types import Episode, StopReason
from memopd.verify.distance import Progress
from paper.evaluation import fingerprint
from paper.settings import Recorded

SAMPLED_WITH = ("trajectories", "temperature", "max_tokens", "max_context", "batch", "seed", "dtype")


def counts(episodes: Sequence[Episode]) -> dict[str, int]:
    calls = [c for e in episodes for c in e.calls]
    sampled = sum(len(c.completion) for c in calls if c.trainable)
    return {"trajectories": len(episodes), "calls": len(calls), "sampled_tokens": sampled}


def sentence(settings: Recorded, counted: dict[str, int]) -> str:
    return (
        f"{counted['trajectories']} trajectories of `{policy_name(settings.model, settings.adapter)}`, "
        f"{counted['calls']:,} calls, {counted['sampled_tokens']:,} sampled tokens; {settings.dtype}."
    )


@dataclass
class Subject:
    """The model that is examined, and its own trajectories. Models are loaded when they are first needed."""

    settings: Recorded
    work: Path
    progress: Progress

    def episodes(self, rule: str, tasks: str | None = None) -> list[Episode]:
        """One trajectory for each of the first tasks in the file. They are sampled unless they exist."""
        from memopd.record import read_episodes, write_episodes

        tasks = tasks or self.settings.tasks[0]
        text = json.dumps(self.sampled_with(rule, tasks), indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        folder = self.work / "trajectories" / f"{rule.replace(':', '-')}-{digest}"
        if not folder.is_dir():
            with whole_folder(folder) as partial:
                write_episodes(partial / "episodes.parquet", self._sample(rule, tasks))
                (partial / "settings.json").write_text(text + "\n")
        return sorted(read_episodes(folder / "episodes.parquet"), key=lambda e: e.id)

    def sampled_with(self, rule: str, tasks: str | None = None) -> dict[str, Any]:
        """Everything that the trajectories depend on."""
        tasks = tasks or self.settings.tasks[0]
        read = {name: content_digest(where) for name, where in (("tasks", tasks), ("index", self.settings.index))}
        weights = fingerprint(Path(self.settings.model), self.settings.adapter, self.settings.dtype)
        asked = {"weights": weights, "tasks": tasks, "read": read, "rule": rule}
        return asked | {name: getattr(self.settings, name) for name in SAMPLED_WITH}

    def replayed(self, rule: str, recorded: Sequence[Episode]) -> list[Episode]:
        """The same actions under another rule: each call reads what that rule would have put into its context.

        A search is made again, because `refresh` asks for other passages. No context is too long.
        """
        from memopd.agent import Agent
        from memopd.models.load import load_tokenizer
        from memopd.tasks.files import read_tasks

        tokenizer = load_tokenizer(self.settings.model)
        tasks = {task.id: task for task in read_tasks(self.settings.tasks[0])}
        environment, memory = self._parts(rule, tokenizer)
        agent = Agent(Replay(recorded), environment, memory, tokenizer, max_context=np.iinfo(np.int32).max, rule=rule)
        pairs = [(e.id, tasks[e.task_id]) for e in recorded]
        made = sorted(agent.play(self.progress(f"contexts, {rule}", pairs)), key=lambda e: e.id)
        check_same_actions(recorded, made)
        return made

    @cached_property
    def model(self) -> Any:
        return self._load(self.settings.model, self.settings.adapter)

    @cached_property
    def teacher(self) -> Any:
        from memopd.models.load import check_same_tokenizer

        if not self.settings.teacher:
            raise ValueError("teacher: this experiment needs one; name a model folder in its configuration")
        check_same_tokenizer(self.settings.model, self.settings.teacher)
        return self._load(self.settings.teacher, self.settings.teacher_adapter)

    def _load(self, path: str, adapter: str) -> Any:
        return load_model(path, Precision(self.settings.dtype), adapter or None)

    def _sample(self, rule: str, tasks: str) -> Iterator[Episode]:
        from memopd.agent import Agent, repeat
        from memopd.engine.local import LocalEngine
        from memopd.models.load import load_tokenizer
        from memopd.tasks.files import read_tasks
        from memopd.types import Sampling

        s, tokenizer = self.settings, load_tokenizer(self.settings.model)
        found = read_tasks(tasks)
        if len(found) < s.trajectories:
            raise ValueError(f"{tasks}: has {len(found)} tasks, but trajectories = {s.trajectories}")
        environment, memory = self._parts(rule, tokenizer)
        sampling = Sampling(temperature=s.temperature, max_tokens=s.max_tokens)
        engine = LocalEngine(self.model, tokenizer, slots=s.batch, max_length=s.max_context + s.max_tokens)
        pairs = self.progress(f"trajectories, {rule}", list(repeat(found[: s.trajectories])))
        agent = Agent(engine, environment, memory, tokenizer, sampling, s.batch, s.max_context, rule)
        try:
            yield from agent.play(pairs, s.seed)
        finally:
            engine.close()

    def _parts(self, rule: str, tokenizer: Any) -> Any:
        from memopd.agent.parts import build_parts
        from memopd.config import TasksConfig

        return build_parts(TasksConfig(index=self.settings.index, memory=rule), tokenizer)


class Replay:
    """An engine that says again what was sampled, whatever it reads."""

    def __init__(self, recorded: Iterable[Episode]) -> None:
        self.actions = {e.id: iter(e.actions) for e in recorded}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        if request.purpose:
            raise ValueError(f"the rule asks the model for {request.purpose!r}, which nobody recorded: leave it out")
        call = next(self.actions[request.episode])
        return Completion(call.completion, None, call.stop or StopReason.STOP)


def check_same_actions(recorded: Sequence[Episode], made: Sequence[Episode]) -> None:
    """A table of rules compares the same actions, or nothing."""
    for before, after in zip(recorded, made, strict=True):
        ours, theirs = ([c.completion.tolist() for c in e.actions] for e in (before, after))
        if before.id != after.id or ours != theirs:
            raise ValueError(f"episode {before.id!r}: the actions under {after.memory!r} are not those recorded")
