"""Where a step's episodes come from: sampled by the policy as it is now, or recorded earlier (`--replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memopd.agent.environment import SearchEnvironment
from memopd.agent.memory import memory_rule
from memopd.agent.rollout import check_fits, codec_of, prefix_of, rollout
from memopd.config import RunConfig
from memopd.record import read_episodes
from memopd.retrieval import open_index
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
    """The same recorded episodes in the same order, however the policy moves."""

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
    """The policy in its environment. Each rank samples its share of the tasks; all ranks get all episodes."""

    def __init__(self, config: RunConfig, root: PolicyRoot, tokenizer: Any, run: Path) -> None:
        t = config.tasks
        if not t.index:
            raise ValueError("tasks.index: name an index folder or the URL of a retrieval service to sample with")
        self.config = config
        self.tokenizer = tokenizer
        self.tasks = read_tasks(t.train) if t.train else []
        self.dev_tasks = read_tasks(t.dev)[: config.run.dev_tasks] if t.dev else []
        self.memory = memory_rule(t.memory, codec_of(tokenizer))
        self.environment = SearchEnvironment(
            open_index(t.index),
            t.topk,
            reward=t.reward,
            grading=t.grading,
            query=self.memory.query,
        )
        self._check_prompts()
        self.policy = (ServedPolicy if config.sampling.servers else LocalPolicy)(config, root, tokenizer, run)

    def _check_prompts(self) -> None:
        """Now: a task that does not fit would end the run when it is drawn, and again whenever that is resumed."""
        limit, template = self.config.tasks.max_context, len(prefix_of(self.tokenizer, ""))
        for task in (*self.tasks, *self.dev_tasks):
            text = self.environment.start(task).text or ""
            if template + len(text.encode()) >= limit:  # no token is shorter than a byte: most need no look
                check_fits(task, prefix_of(self.tokenizer, text), limit, "tasks.max_context")

    def episodes(self, step: int) -> list[Episode]:
        """Of the policy after `step` updates."""
        o = self.config.optimise
        asked = [self._task(i) for i in range(step * o.tasks, (step + 1) * o.tasks)]
        return self._run(step, [
            (f"step-{step:06d}/{i:04d}-{n}/{task.id}", task) for i, task in enumerate(asked) for n in range(o.samples)
        ])  # fmt: skip

    def dev(self, step: int) -> list[Episode]:
        return self._run(step, [(f"dev-{step:06d}/{task.id}", task) for task in self.dev_tasks])

    def close(self) -> None:
        self.policy.engine.close()

    def _run(self, version: int, pairs: Sequence[tuple[str, Task]]) -> list[Episode]:
        self.policy.refresh(version)
        s, t = self.config.sampling, self.config.tasks
        mine = rollout(
            self.policy.engine,
            self.environment,
            self.memory,
            self.tokenizer,
            ranks.share(pairs),
            Sampling(temperature=s.temperature, max_tokens=s.max_tokens),
            self.config.run.seed,
            s.batch,
            t.max_context,
            t.memory,
        )
        everyone = {e.id: e for part in ranks.gather(list(mine)) for e in part}
        return [everyone[id] for id, _ in pairs]

    def _task(self, number: int) -> Task:
        """Tasks in a random order, another one each time round: a function of the seed alone."""
        if not self.tasks:
            raise ValueError("tasks.train: name a file of tasks to train on")
        lap, at = divmod(number, len(self.tasks))
        return self.tasks[int(_order(self.config.run.seed, lap, len(self.tasks))[at])]


@lru_cache(maxsize=2)
def _order(seed: int, lap: int, count: int) -> Any:
    return np.random.default_rng([seed, lap]).permutation(count)
