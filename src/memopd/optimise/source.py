"""Where a step's episodes come from: sampled by the policy as it is now, or recorded earlier (`--replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memopd.agent.environment import SearchEnvironment
from memopd.agent.memory import memory_rule
from memopd.config import RunConfig
from memopd.engine.protocol import LiveEngine
from memopd.optimise import ranks
from memopd.optimise.models import Root, full_state, whole_model
from memopd.record import read_episodes
from memopd.record.rollout import codec_of, repeat, rollout
from memopd.retrieval import open_index
from memopd.tasks import Task
from memopd.tasks.files import read_tasks
from memopd.types import Episode, Sampling


class Source(Protocol):
    def episodes(self, step: int) -> list[Episode]: ...


class Replay:
    """The same recorded episodes in the same order, however the policy moves."""

    def __init__(self, path: Path, per_step: int) -> None:
        self.recorded = list(read_episodes(path))
        self.per_step = per_step

    def episodes(self, step: int) -> list[Episode]:
        at = step * self.per_step
        return [self.recorded[(at + i) % len(self.recorded)] for i in range(min(self.per_step, len(self.recorded)))]


class Sampler:
    """The policy in its environment. Each rank samples its share of the tasks; all ranks get all episodes."""

    def __init__(self, config: RunConfig, root: Root, tokenizer: Any) -> None:
        self.config = config
        self.root = root
        self.tokenizer = tokenizer
        self.tasks = read_tasks(config.tasks.train) if config.tasks.train else []
        self.dev_tasks = read_tasks(config.tasks.dev)[: config.run.dev_tasks] if config.tasks.dev else []
        self.memory = memory_rule(config.tasks.memory, codec_of(tokenizer))
        self.environment = SearchEnvironment(
            open_index(config.tasks.index),
            config.tasks.topk,
            reward=config.tasks.reward,
            grading=config.tasks.grading,  # type: ignore[arg-type]
            query=self.memory.query,
        )
        self.model = whole_model(root, config.model.dtype)
        self.engine = self._engine()
        self.version = -1  # of the weights that the engine has

    def episodes(self, step: int) -> list[Episode]:
        self._refresh(step)
        count = self.config.optimise.tasks
        asked = [self._task(i) for i in range(step * count, (step + 1) * count)]
        pairs = [(f"step-{step:06d}/{id}", task) for id, task in repeat(asked, self.config.optimise.samples)]
        return self._run(pairs)

    def dev(self, step: int) -> list[Episode]:
        self._refresh(step)
        return self._run([(f"dev-{step:06d}/{task.id}", task) for task in self.dev_tasks])

    def close(self) -> None:
        self.engine.close()

    def _run(self, pairs: Sequence[tuple[str, Task]]) -> list[Episode]:
        config = self.config
        mine = rollout(
            self.engine,
            self.environment,
            self.memory,
            self.tokenizer,
            ranks.share(pairs),
            Sampling(temperature=config.sampling.temperature, max_tokens=config.sampling.max_tokens),
            config.run.seed,
            config.sampling.batch,
            config.tasks.max_context,
            config.tasks.memory,
        )
        everyone = {e.id: e for part in ranks.gather(list(mine)) for e in part}
        return [everyone[id] for id, _ in pairs]

    def _task(self, number: int) -> Task:
        """Tasks in a random order, another one each time round: a function of the seed alone."""
        lap, at = divmod(number, len(self.tasks))
        order = np.random.default_rng([self.config.run.seed, lap]).permutation(len(self.tasks))
        return self.tasks[int(order[at])]

    def _engine(self) -> LiveEngine:
        config = self.config
        length = config.tasks.max_context + config.sampling.max_tokens
        if not config.sampling.servers:
            from memopd.engine.local import LocalEngine

            return LocalEngine(self.model, self.tokenizer, slots=config.sampling.batch, max_length=length)
        from memopd.engine.vllm import VllmEngine

        return VllmEngine(config.sampling.servers, self.tokenizer)

    def _refresh(self, step: int) -> None:
        """The engine samples with the weights of this step."""
        if self.version != step and self.model is not self.root.model:
            self.model.load_state_dict(full_state(self.root))
        self.version = self.engine.version = step
