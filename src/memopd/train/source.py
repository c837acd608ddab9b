"""Sources of a step's episodes: sampled by the current policy, sampled ahead, or recorded earlier (`--replay`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from memopd.agent import Agent, Environment, Outcome
from memopd.agent.codec import check_fits, check_template, codec_of, prefix_of
from memopd.agent.parts import build_parts
from memopd.config import RunConfig
from memopd.record import read_episodes
from memopd.retrieval.index import is_service, read_info
from memopd.tasks import Task
from memopd.tasks.files import HUB, read_tasks
from memopd.train import ranks
from memopd.train.algorithms import algorithm_of, needs_group
from memopd.train.engines import LocalPolicy, ServedPolicy
from memopd.train.models import PolicyRoot
from memopd.types import Episode, Sampling

log = logging.getLogger("memopd")

Graded: TypeAlias = tuple[Episode, Outcome]
Count: TypeAlias = Callable[[str, Iterable[Any], int], Iterable[Any]]  # what, items, how many: shows them as they come


def uncounted(what: str, items: Iterable[Any], total: int) -> Iterable[Any]:
    return items


class Source(Protocol):
    def episodes(self, step: int) -> list[Episode]: ...

    def sampled_ahead(self) -> dict[int, list[Episode]]:
        """The batches of later steps that were begun, when they are complete. All ranks must call it."""

    def close(self) -> None: ...


def check_sources(config: RunConfig, stores: Sequence[str], samples: bool) -> None:
    """Report what is missing before any model is loaded: recorded episodes and, if the run `samples`, what it plays."""
    tasks = config.tasks
    for store in stores:
        read_episodes(store)  # looks for the files, and reads none yet
    if not samples:
        return
    for name in ("train", "dev"):
        path = getattr(tasks, name)
        if path and not path.startswith(HUB) and not Path(path).is_file():
            raise ValueError(f"tasks.{name}: {path}: no such file")
    if tasks.index and not is_service(tasks.index):
        read_info(Path(tasks.index))


def open_source(config: RunConfig, root: PolicyRoot, tokenizer: Any, run: Path, count: Count = uncounted) -> Source:
    if config.sampling.replay:
        if config.run.dev_every and ranks.rank() == 0:
            log.warning("run.dev_every: dev is not measured, because a run with sampling.replay does not sample")
        o = config.optimise
        return Replay(config.sampling.replay, o.tasks * o.samples, grouped=needs_group(algorithm_of(o)))
    if config.run.dev_every and not config.tasks.dev:
        raise ValueError("run.dev_every: name the tasks to evaluate on in tasks.dev, or set it to 0")
    return (AheadSampler if config.sampling.ahead else Sampler)(config, root, tokenizer, run, count)


class Replay:
    """The same recorded episodes in the same order, independent of the policy.

    A store may have its episodes in the order in which they ended. `grouped` is for algorithms that compare the
    episodes of a task: these then follow each other, so that a step has all of them.
    """

    def __init__(self, path: str, per_step: int, grouped: bool = False) -> None:
        self.recorded = list(read_episodes(path))
        if not self.recorded:
            raise ValueError(f"{path}: there is no episode in it to train on")
        self.per_step = min(per_step, len(self.recorded))
        laps = [re.match(r"lap-(\d+)/", e.id) for e in self.recorded]  # of the run that wrote this store
        self.before = max((int(found[1]) for found in laps if found), default=0)
        if grouped:
            self._group(path)

    def _group(self, path: str) -> None:
        groups: dict[tuple[str, str], list[Episode]] = {}
        for episode in self.recorded:
            groups.setdefault((episode.task_id, _visit(episode.id)), []).append(episode)
        self.recorded = [episode for group in groups.values() for episode in group]
        split, at = 0, 0
        for group in groups.values():
            if at // self.per_step != (at + len(group) - 1) // self.per_step:
                split += len(group)
            at += len(group)
        if split and ranks.rank() == 0:
            log.warning(
                "%s: %d of %d episodes are compared with only a part of the episodes of their task, which two steps "
                "share: make optimise.tasks × optimise.samples a multiple of the episodes per task", path, split, at,
            )  # fmt: skip

    def episodes(self, step: int) -> list[Episode]:
        return [self._episode(step * self.per_step + i) for i in range(self.per_step)]

    def _episode(self, number: int) -> Episode:
        """From the second lap on with an id of its own, because the run's episodes are a store too."""
        lap, at = divmod(number, len(self.recorded))
        episode = self.recorded[at]
        return replace(episode, id=f"lap-{self.before + lap}/{episode.id}") if lap else episode

    def sampled_ahead(self) -> dict[int, list[Episode]]:
        return {}

    def close(self) -> None: ...


class Sampler:
    """Samples the policy in its environment. Each rank samples its share of the tasks; all ranks get all episodes."""

    def __init__(
        self, config: RunConfig, root: PolicyRoot, tokenizer: Any, run: Path, count: Count = uncounted
    ) -> None:
        s, t = config.sampling, config.tasks
        self.config, self.count = config, count
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
        check_template(tokenizer)
        limit, template = self.config.tasks.max_context, len(prefix_of(tokenizer, ""))
        for task in (*self.tasks, *self.dev_tasks):
            text = environment.start(task).text or ""
            if template + len(text.encode()) >= limit:  # no token is shorter than a byte, so most need no check
                check_fits(task, prefix_of(tokenizer, text), limit, "tasks.max_context")

    def episodes(self, step: int) -> list[Episode]:
        """The episodes of the policy after `step` updates."""
        return self._run(step, self._pairs(step))

    def dev(self, step: int) -> list[Episode]:
        return self._run(step, [(f"dev-{step:06d}/{task.id}", task) for task in self.dev_tasks])

    def sampled_ahead(self) -> dict[int, list[Episode]]:
        return {}

    def close(self) -> None:
        self.policy.engine.close()

    def _pairs(self, step: int) -> list[tuple[str, Task]]:
        """The ids and tasks of a step's episodes. They depend only on the seed and the step."""
        o = self.config.optimise
        tasks = [self._task(i) for i in range(step * o.tasks, (step + 1) * o.tasks)]
        return [
            (f"step-{step:06d}/{i:04d}-{n}/{task.id}", task) for i, task in enumerate(tasks) for n in range(o.samples)
        ]

    def _run(self, version: int, pairs: Sequence[tuple[str, Task]]) -> list[Episode]:
        self.policy.refresh(version)
        mine = self._play(pairs, self.count)
        self.policy.release()
        return self._keep_outcomes(self._together(pairs, mine))

    def _play(self, pairs: Sequence[tuple[str, Task]], count: Count = uncounted) -> list[Graded]:
        """This rank's share of the episodes."""
        mine = ranks.share(pairs)
        return list(count("episodes", self.agent.graded(mine, self.config.run.seed, frees_model=False), len(mine)))

    def _together(self, pairs: Sequence[tuple[str, Task]], mine: list[Graded]) -> list[Graded]:
        """The episodes of all ranks, in the order of `pairs`."""
        everyone = {episode.id: (episode, outcome) for part in ranks.gather(mine) for episode, outcome in part}
        return [everyone[id] for id, _ in pairs]

    def _keep_outcomes(self, graded: Sequence[Graded]) -> list[Episode]:
        self.outcomes = {episode.id: outcome for episode, outcome in graded}
        return [episode for episode, _ in graded]

    def _task(self, number: int) -> Task:
        """Tasks in a random order, a new one for each lap over them. Depends only on the seed."""
        if not self.tasks:
            raise ValueError("tasks.train: name a file of tasks to train on")
        lap, at = divmod(number, len(self.tasks))
        return self.tasks[int(_order(self.config.run.seed, lap, len(self.tasks))[at])]


class AheadSampler(Sampler):
    """Samples the next batches on the servers while one trains (sampling.ahead = n).

    A thread plays one batch after the other. The ranks exchange weights and episodes in the main thread only, where
    they are in step. When step t begins, the servers get the weights after t updates, and then the batch of step t + n
    is begun, so that no call is more than n updates stale. Calls that are open then end with the weights that they
    began with, and the later calls of their episodes get the new ones. With n = 1 no call is open then.
    """

    def __init__(
        self, config: RunConfig, root: PolicyRoot, tokenizer: Any, run: Path, count: Count = uncounted
    ) -> None:
        super().__init__(config, root, tokenizer, run, count)
        self.folder = run / "episodes"
        self.decode = codec_of(tokenizer).decode
        self.sampled_again: set[int] = set()  # steps whose batch a killed run had begun with weights that are gone
        self._begun: dict[int, Future[list[Graded]]] = {}  # this rank's share, by step
        self._complete: dict[int, list[Graded]] = {}  # the episodes of all ranks
        self._thread = ThreadPoolExecutor(1, "sampling ahead")

    def episodes(self, step: int) -> list[Episode]:
        """The episodes of policies after `step` − n to `step` updates."""
        ahead = self.config.sampling.ahead
        if step not in self._begun and step not in self._complete:  # the run starts, or is resumed
            self._start(step)
        graded = self._completed(step)
        self.policy.refresh(step)
        self._begin(step + ahead)
        del self._complete[step]
        episodes = self._keep_outcomes(graded)
        assert all(0 <= step - v <= ahead for v in versions(episodes)), (step, set(versions(episodes)))
        return episodes

    def dev(self, step: int) -> list[Episode]:
        self.sampled_ahead()  # with the weights that these batches were begun with
        return super().dev(step)

    def sampled_ahead(self) -> dict[int, list[Episode]]:
        return {step: [e for e, _ in self._completed(step)] for step in sorted({*self._begun, *self._complete})}

    def close(self) -> None:
        """Cancel all calls, which ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()
        self._thread.shutdown()

    def _start(self, step: int) -> None:
        """Begin the batches of the first steps. A resumed run has them in files, or must sample them again."""
        self.policy.refresh(step)
        for later in range(step, min(step + self.config.sampling.ahead, self.config.optimise.steps)):
            first = ranks.rank() == 0
            if step and (found := ranks.gather(self._recorded(later, step) if first else None)[0]):
                self._complete[later] = found
                continue
            self._begin(later)
            if step:
                self.sampled_again.add(later)
            if step and first:
                log.warning(
                    "the episodes step-%06d/* that the run had sampled ahead are lost: they are sampled again, with "
                    "the policy after %d updates", later, step,
                )  # fmt: skip

    def _recorded(self, step: int, version: int) -> list[Graded] | None:
        """The batch of a step as `sampled_ahead` gave it before the checkpoint of `version` was written; None: lost."""
        file, pairs = self.folder / f"step-{step:06d}.parquet", self._pairs(step)
        try:
            episodes = list(read_episodes(file))
        except ValueError as error:
            log.info("%s", error)
            return None
        # The user may have gone back to an older checkpoint, and its run will have other later policies.
        if [e.id for e in episodes] != [id for id, _ in pairs] or max(versions(episodes)) > version:
            return None
        grade, said = self.agent.environment.grade, self.decode
        return [
            (e, grade(task, [said(c.completion) for c in e.calls if not c.purpose]))
            for e, (_, task) in zip(episodes, pairs, strict=True)
        ]

    def _begin(self, step: int) -> None:
        if step < self.config.optimise.steps:
            self._begun[step] = self._thread.submit(self._play, self._pairs(step))

    def _completed(self, step: int) -> list[Graded]:
        """Wait for a batch. An error of its thread is raised here. All ranks must call it."""
        if step in self._begun:
            self._complete[step] = self._together(self._pairs(step), self._begun.pop(step).result())
        return self._complete[step]


def _visit(id: str) -> str:
    """A run that samples plays a task again in later steps, and compares only the episodes of the same visit.

    It is step-000012/0003 of step-000012/0003-1/TASK, and empty for the ids of others. Laps of a replay are visits too.
    """
    found = re.match(r"(lap-\d+/)*(step-\d+/\d+(?=-\d+/))?", id)
    return found[0] if found else ""


def versions(episodes: Sequence[Episode]) -> list[int]:
    """The policy version of every call. Engines record one."""
    return [-1 if call.policy_version is None else call.policy_version for e in episodes for call in e.calls]


@lru_cache(maxsize=2)
def _order(seed: int, lap: int, count: int) -> Any:
    return np.random.default_rng([seed, lap]).permutation(count)
