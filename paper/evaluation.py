"""Evaluates one model on all horizons, in one process: `python -m paper.evaluation PLAN.json`.

Every part is written atomically to its own file, so a killed process leaves the parts that it had finished.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memopd.config import TasksConfig
from memopd.evaluate import Measures, measure_outcomes
from memopd.evaluate.provenance import changed, identity, source
from memopd.files import whole
from paper.settings import Evaluation


@dataclass(frozen=True, slots=True)
class Part:
    system: str
    seed: int  # also of the sampling, so that two systems can be compared in pairs
    k: int
    memory: str
    tasks: str
    output: str
    processes: int = 1  # that shared the machine, on which the seconds depend


@dataclass(frozen=True, slots=True)
class Plan:
    model: str
    parts: tuple[Part, ...]
    settings: Evaluation

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def read_plan(path: Path) -> Plan:
    table = json.loads(path.read_text())
    return Plan(table["model"], tuple(Part(**p) for p in table["parts"]), Evaluation(**table["settings"]))


def measured_with(part: Part, settings: Evaluation) -> dict[str, Any]:
    """The settings that a result depends on besides the weights. Results with other settings are not used."""
    names = ("index", "limit", "samples", "temperature", "max_tokens", "max_context", "batch", "dtype", "grading")
    return {"memory": part.memory, "tasks": part.tasks} | {name: getattr(settings, name) for name in names}


def is_made(plan: Plan, part: Part) -> bool:
    """Whether the result exists, with these settings and, if the model still exists, with its weights."""
    file = Path(part.output)
    if not file.is_file():
        return False
    found = json.loads(file.read_text())
    weights = fingerprint(Path(plan.model))
    same = found["settings"] == measured_with(part, plan.settings) and weights in (None, found["weights"])
    return same and not changed_inputs(found)


def changed_inputs(found: dict[str, Any]) -> list[str]:
    """The tasks and the index of a result, if their content has changed since. `is_made` compares the weights."""
    return changed({"inputs": {name: one for name, one in found.get("inputs", {}).items() if name != "model"}})


def fingerprint(model: Path) -> str | None:
    """SHA-256 of the weights, or None if there are none."""
    files = sorted(model.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def evaluate(plan: Plan) -> None:
    import torch

    from benchmarks.timing import machine
    from memopd.engine.local import LocalEngine
    from memopd.models.load import load_causal_lm, load_tokenizer
    from memopd.retrieval import open_index

    s = plan.settings
    todo = [part for part in plan.parts if not is_made(plan, part)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_causal_lm(plan.model, getattr(torch, s.dtype)).to(device).eval()
    tokenizer, index = load_tokenizer(plan.model), open_index(s.index)
    engine = LocalEngine(model, tokenizer, slots=s.batch, max_length=s.max_context + s.max_tokens)
    where, policy, passages = machine(), identity(plan.model), identity(s.index)
    try:
        for part in todo:
            start = time.time()
            played = TasksConfig(memory=part.memory, grading=s.grading, max_context=s.max_context)
            measures = _measure(part, s, played, engine, tokenizer, index)
            result = {
                "system": part.system, "seed": part.seed, "k": part.k, "model": plan.model,
                "weights": fingerprint(Path(plan.model)), "settings": measured_with(part, s),
                "played_with": asdict(played), **source(),
                "inputs": {"model": policy, "tasks": identity(part.tasks), "index": passages},
                "engine": f"local, {where['device']}", "processes": part.processes, "machine": where,
                "seconds": round(time.time() - start, 2), "measures": [asdict(m) for m in measures],
            }  # fmt: skip
            with whole(Path(part.output)) as partial:
                partial.write_text(json.dumps(result) + "\n")
            em = sum(m.em for m in measures) / len(measures)
            print(f"{part.system} seed {part.seed} Q{part.k}: EM {em:.3f} of {len(measures)} tasks", flush=True)
    finally:
        engine.close()


def _measure(part: Part, s: Evaluation, played: TasksConfig, engine: Any, tokenizer: Any, index: Any) -> list[Measures]:
    from memopd.agent import Agent, repeat
    from memopd.agent.parts import build_parts
    from memopd.tasks.files import read_tasks
    from memopd.types import Sampling

    tasks = read_tasks(part.tasks)[: s.limit or None]
    environment, memory = build_parts(played, tokenizer, index)
    sampling = Sampling(temperature=s.temperature, max_tokens=s.max_tokens)
    agent = Agent(engine, environment, memory, tokenizer, sampling, s.batch, s.max_context, part.memory)
    return measure_outcomes(agent.graded(repeat(tasks, s.samples), part.seed), tasks)


if __name__ == "__main__":
    evaluate(read_plan(Path(sys.argv[1])))
