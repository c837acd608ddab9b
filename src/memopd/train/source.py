"""Sources of a step's episodes: sampled by the current policy, or recorded earlier (`--replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memopd.agent import Agent, Environment, Outcome
from memopd.agent.codec import check_fits, prefix_of
from memopd.agent.parts import build_parts
from memopd.config import RunConfig
from memopd.record import read_episodes
from memopd.tasks import Task
from memopd.tasks.files import read_tasks
from memopd.train import ranks
from memopd.train.engines import LocalPolicy, ServedPolicy
from memopd.train.models import PolicyRoot
from memopd.types import Episode, Sampling


class Source(Protocol):
    def episodes(self, step: int) -> list[Episode]: ...

    def close(self) -> None: ...


def open_source(config: RunConfig, root: PolicyRoot, tokenizer: Any, run: Path) -> Source:
    if config.sampling.replay:
        return Replay(config.sampling.replay, config.optimise.tasks * config.optimise.samples)
    if config.run.dev_every and not config.tasks.dev:
        raise ValueError("run.dev_every: name the tasks to evaluate on in tasks.dev, or set it to 0")
    return Sampler(config, root, tokenizer, run)


class Replay:
    """The same recorded episodes in the same order, independent of the policy."""

    def __init__(self, path: str, per_step: int) -> None:
        self.recorded = list(read_episodes(path))
        if not self.recorded:
            raise ValueError(f"{path}: there is no episode in it to train on")
        self.per_step = min(per_step, len(self.recorded))

    def episodes(self, step: int) -> list[Episode]:
        at = step * self.per_step
        return [self.recorded[(at + i) % len(self.recorded)] for i in range(self.per_step)]

    def close(self) -> None: ...


class Sampler:
    """Samples the policy in its environment. Each rank samples its share of the tasks; all ranks get all episodes."""

    def __init__(self, config: RunConfig, root: PolicyRoot, tokenizer: Any, run: Path) -> None:
        s, t = config.sampling, config.tasks
        self.config = config
        self.tasks = read_tasks(t.train) if t.train else []
        self.dev_tasks = read_tasks(t.dev)[: config.run.dev_tasks] if t.dev else []
        self.outcomes: dict[str, Outcome] = {}  # of the episodes sampled last, by their ids
        environment, memory = build_parts(t, tokenizer)
        self._check_prompts(environment, tokenizer)
        self.policy = (ServedPolicy if s.servers else LocalPolicy)(config, root, tokenizer, run)
        sampling = Sampling(temperature=s.temperature, max_tokens=s.max_tokens)
        self.agent = Agent(
            self.policy.engine, environment, memory, tokenizer, sampling, s.batch, t.max_context, t.memory
        )  # fmt: skip

    def _check_prompts(self, environment: Environment, tokenizer: Any) -> None:
        """Check all prompts at the start: a task that does not fit would end the run, and every resumed run, later."""
        limit, template = self.config.tasks.max_context, len(prefix_of(tokenizer, ""))
        for task in (*self.tasks, *self.dev_tasks):
            text = environment.start(task).text or ""
            if template + len(text.encode()) >= limit:  # no token is shorter than a byte, so most need no check
                check_fits(task, prefix_of(tokenizer, text), limit, "tasks.max_context")

    def episodes(self, step: int) -> list[Episode]:
        """The episodes of the policy after `step` updates."""
        o = self.config.optimise
        tasks = [self._task(i) for i in range(step * o.tasks, (step + 1) * o.tasks)]
        return self._run(step, [
            (f"step-{step:06d}/{i:04d}-{n}/{task.id}", task) for i, task in enumerate(tasks) for n in range(o.samples)
        ])  # fmt: skip

    def dev(self, step: int) -> list[Episode]:
        return self._run(step, [(f"dev-{step:06d}/{task.id}", task) for task in self.dev_tasks])

    def close(self) -> None:
        self.policy.engine.close()

    def _run(self, version: int, pairs: Sequence[tuple[str, Task]]) -> list[Episode]:
        self.policy.refresh(version)
        mine = list(self.agent.graded(ranks.share(pairs), self.config.run.seed))
        self.policy.release()
        everyone = {e.id: (e, outcome) for part in ranks.gather(mine) for e, outcome in part}
        self.outcomes = {id: outcome for id, (_, outcome) in everyone.items()}
        return [everyone[id][0] for id, _ in pairs]

    def _task(self, number: int) -> Task:
        """Tasks in a random order, a new one for each lap over them. Depends only on the seed."""
        if not self.tasks:
            raise ValueError("tasks.train: name a file of tasks to train on")
        lap, at = divmod(number, len(self.tasks))
        return self.tasks[int(_order(self.config.run.seed, lap, len(self.tasks))[at])]


@lru_cache(maxsize=2)
def _order(seed: int, lap: int, count: int) -> Any:
    return np.random.default_rng([seed, lap]).permutation(count)
