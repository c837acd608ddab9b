"""Evaluates one model on all data sets and horizons, in one process: `python -m paper.evaluation PLAN.json`.

The episodes of all parts share the engine's batches, those of the most questions first: one after the other, the last
episodes of each part would be sampled almost alone. What an episode samples depends on its own seed, not on the others.
Every part is written atomically to its own file as soon as its last episode ends.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from memopd.agent import Agent, Outcome, repeat
from memopd.agent.parts import build_parts
from memopd.cli.options import Precision, load_sampler
from memopd.config import TasksConfig
from memopd.evaluate import Measures, measure_outcomes
from memopd.evaluate.provenance import changed, identity, source
from memopd.files import whole
from memopd.tasks import Task
from memopd.tasks.files import read_tasks
from memopd.types import Episode, Sampling
from paper.settings import Evaluation

WEIGHTS = ("model", "adapter")  # the inputs of a result that `is_made` compares by their fingerprint


@dataclass(frozen=True, slots=True)
class Part:
    system: str
    seed: int  # also of the sampling, so that two systems can be compared in pairs
    k: int
    memory: str
    tasks: str
    output: str
    processes: int = 1  # that shared the machine, on which the seconds depend
    data: str = ""  # the data set, if there are several


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    parts: tuple[Part, ...]
    settings: Evaluation
    adapter: str = ""  # of the model

    @property
    def exists(self) -> bool:
        """Whether the weights are on this machine. A name of the hub counts as soon as its adapter is there."""
        if self.adapter:
            return Path(self.adapter, "adapter_config.json").is_file()
        return Path(self.model, "config.json").is_file()

    def weights(self) -> str | None:
        return fingerprint(Path(self.model), self.adapter, self.settings.dtype)

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_plan(path: Path) -> Plan:
    table = json.loads(path.read_text())
    settings = Evaluation(**table["settings"] | {"data": tuple(table["settings"]["data"])})
    return Plan(table["model"], tuple(Part(**p) for p in table["parts"]), settings, table["adapter"])


def measured_with(part: Part, settings: Evaluation) -> dict[str, Any]:
    """The settings that a result depends on besides the weights. Results with other settings are not used."""
    names = ("index", "limit", "samples", "temperature", "max_tokens", "max_context", "batch", "dtype", "grading")
    asked = {"memory": part.memory, "tasks": part.tasks} | {name: getattr(settings, name) for name in names}
    return asked if settings.top_p == 1 else asked | {"top_p": settings.top_p}  # older results do not have it


def is_made(plan: Plan, part: Part) -> bool:
    """Whether the result exists, with these settings and, if the model still exists, with its weights."""
    file = Path(part.output)
    if not file.is_file():
        return False
    found = json.loads(file.read_text())
    weights = plan.weights()
    same = found["settings"] == measured_with(part, plan.settings) and weights in (None, found["weights"])
    return same and not changed_inputs(found)


def changed_inputs(found: dict[str, Any]) -> list[str]:
    """The tasks and the index of a result, if their content has changed since. `is_made` compares the weights."""
    return changed({"inputs": {name: one for name, one in found.get("inputs", {}).items() if name not in WEIGHTS}})


def fingerprint(model: Path, adapter: str = "", dtype: str = "float32") -> str | None:
    """SHA-256 of the weights, or None if there are none here.

    An adapter counts in the precision that it is sampled in, so that a copy in bfloat16 (paper/bring.py) is the same.
    """
    files = sorted(model.glob("*.safetensors"))
    weights = Path(adapter, "adapter_model.safetensors")
    if not files or (adapter and not weights.is_file()):
        return None
    base = _digest(tuple(map(_as_it_is, files)))
    return hashlib.sha256(f"{base} {_rounded(_as_it_is(weights), dtype)}".encode()).hexdigest() if adapter else base


def _as_it_is(file: Path) -> tuple[str, int, int]:
    """A file with its size and time, so that a digest is computed again if it changes."""
    return str(file), file.stat().st_size, file.stat().st_mtime_ns


@lru_cache
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in files:
        with Path(name).open("rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


@lru_cache
def _rounded(file: tuple[str, int, int], dtype: str) -> str:
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(file[0]).items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(tensor.to(getattr(torch, dtype)).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def evaluate(plan: Plan) -> None:
    from benchmarks.timing import machine
    from memopd.engine.local import LocalEngine
    from memopd.models.load import load_tokenizer
    from memopd.retrieval import open_index

    s = plan.settings
    todo = [part for part in plan.parts if not is_made(plan, part)]
    model = load_sampler(plan.model, Precision(s.dtype), plan.adapter or None)
    tokenizer, index = load_tokenizer(plan.model), open_index(s.index)
    length = s.max_context + s.max_tokens
    engine = LocalEngine(model, tokenizer, slots=s.batch, max_length=length, fused=True)
    where, passages, weights = machine(), identity(s.index), plan.weights()
    policy = {"model": identity(plan.model)} | ({"adapter": identity(plan.adapter)} if plan.adapter else {})
    sampling = Sampling(temperature=s.temperature, top_p=s.top_p, max_tokens=s.max_tokens)
    try:
        for parts in together(todo, s):
            start, (first, *_) = time.time(), parts
            played = TasksConfig(memory=first.memory, grading=s.grading, max_context=s.max_context)
            environment, memory = build_parts(played, tokenizer, index)
            agent = Agent(engine, environment, memory, tokenizer, sampling, s.batch, s.max_context, first.memory)
            for part, measures in measured(agent, parts, s.samples):
                result = {
                    "system": part.system, "seed": part.seed, "data": part.data, "k": part.k, "model": plan.model,
                    "adapter": plan.adapter, "weights": weights, "settings": measured_with(part, s),
                    "played_with": asdict(played), **source(),
                    "inputs": policy | {"tasks": identity(part.tasks), "index": passages},
                    "engine": f"local, {where['device']}", "processes": part.processes, "machine": where,
                    "seconds": round(time.time() - start, 2), "measures": [asdict(m) for m in measures],
                }  # fmt: skip
                with whole(Path(part.output)) as partial:
                    partial.write_text(json.dumps(result) + "\n")
                em = sum(m.em for m in measures) / len(measures)
                what = f"{part.system} seed {part.seed} {part.data} Q{part.k}"
                print(f"{what}: EM {em:.3f} of {len(measures)} episodes, {result['seconds']:.0f} s", flush=True)
    finally:
        engine.close()


def together(parts: Sequence[Part], settings: Evaluation) -> Iterator[dict[Part, list[Task]]]:
    """Parts that one agent can play at once, with their tasks, the longest first: of one seed and one memory rule."""
    groups: list[dict[Part, list[Task]]] = []
    for part in sorted(parts, key=lambda part: -part.k):
        tasks = read_tasks(part.tasks)[: settings.limit or None]
        names = {task.id for task in tasks}
        for group in groups:
            of_group = next(iter(group))
            taken = {task.id for others in group.values() for task in others}
            if (of_group.seed, of_group.memory) == (part.seed, part.memory) and not names & taken:
                group[part] = tasks
                break
        else:
            groups.append({part: tasks})
    yield from groups


def measured(agent: Agent, parts: dict[Part, list[Task]], samples: int) -> Iterator[tuple[Part, list[Measures]]]:
    """Yields every part when the last of its episodes has ended."""
    part_of = {task.id: part for part, tasks in parts.items() for task in tasks}
    played: dict[Part, list[tuple[Episode, Outcome]]] = {part: [] for part in parts}
    (seed,) = {part.seed for part in parts}
    waiting = repeat((task for tasks in parts.values() for task in tasks), samples)
    for episode, outcome in agent.graded(waiting, seed, frees_model=False):
        part = part_of[episode.task_id]
        played[part].append((episode, outcome))
        if len(played[part]) == len(parts[part]) * samples:
            yield part, measure_outcomes(played.pop(part), parts[part])


if __name__ == "__main__":
    evaluate(read_plan(Path(sys.argv[1])))
