"""The trajectories that a model samples under each context-update rule, stored so that all experiments share them.

WORK/trajectories/mem1-0a1b2c3d4e5f/    episodes.parquet, settings.json; the name contains a digest of the settings
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from memopd.files import whole_folder
from memopd.types import Episode
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
        f"{counted['trajectories']} trajectories of `{settings.model}`, {counted['calls']:,} calls, "
        f"{counted['sampled_tokens']:,} sampled tokens; {settings.dtype}."
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
        asked = {"weights": fingerprint(Path(self.settings.model)), "tasks": tasks, "rule": rule}
        asked |= {name: getattr(self.settings, name) for name in SAMPLED_WITH}
        text = json.dumps(asked, indent=1)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        folder = self.work / "trajectories" / f"{rule.replace(':', '-')}-{digest}"
        if not folder.is_dir():
            with whole_folder(folder) as partial:
                write_episodes(partial / "episodes.parquet", self._sample(rule, tasks))
                (partial / "settings.json").write_text(text + "\n")
        return sorted(read_episodes(folder / "episodes.parquet"), key=lambda e: e.id)

    @cached_property
    def model(self) -> Any:
        return self._load(self.settings.model)

    @cached_property
    def teacher(self) -> Any:
        from memopd.models.load import check_same_tokenizer

        if not self.settings.teacher:
            raise ValueError("teacher: this experiment needs one; name a model folder in its configuration")
        check_same_tokenizer(self.settings.model, self.settings.teacher)
        return self._load(self.settings.teacher)

    def _load(self, path: str) -> Any:
        import torch

        from memopd.models.load import load_causal_lm

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return load_causal_lm(path, getattr(torch, self.settings.dtype)).to(device).eval()

    def _sample(self, rule: str, tasks: str) -> Iterator[Episode]:
        from memopd.agent import Agent, repeat
        from memopd.agent.parts import build_parts
        from memopd.config import TasksConfig
        from memopd.engine.local import LocalEngine
        from memopd.models.load import load_tokenizer
        from memopd.tasks.files import read_tasks
        from memopd.types import Sampling

        s, tokenizer = self.settings, load_tokenizer(self.settings.model)
        found = read_tasks(tasks)
        if len(found) < s.trajectories:
            raise ValueError(f"{tasks}: has {len(found)} tasks, but trajectories = {s.trajectories}")
        environment, memory = build_parts(TasksConfig(index=s.index, memory=rule), tokenizer)
        sampling = Sampling(temperature=s.temperature, max_tokens=s.max_tokens)
        engine = LocalEngine(self.model, tokenizer, slots=s.batch, max_length=s.max_context + s.max_tokens)
        pairs = self.progress(f"trajectories, {rule}", list(repeat(found[: s.trajectories])))
        agent = Agent(engine, environment, memory, tokenizer, sampling, s.batch, s.max_context, rule)
        try:
            yield from agent.play(pairs, s.seed)
        finally:
            engine.close()
