"""Figure c: an actor's forward and backward pass over packed calls, compared with the best arm without sharing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.actor import ActorResult, run_actor
from benchmarks.output import markdown_table
from benchmarks.shapes import episodes_of
from benchmarks.tables import load, plot_actor
from benchmarks.timing import matmul_peak
from memopd.cli.options import policy_name
from memopd.models.adapters import STUDENT, adapter_weights
from memopd.types import Call, Episode
from paper.page import Findings
from paper.trajectories import Subject


def findings(subject: Subject) -> Findings:
    import torch

    s = subject.settings
    model = subject.model
    if s.adapter:  # an actor trains its adapter alone
        for weight in adapter_weights(model, STUDENT).values():
            weight.requires_grad_()
    device = next(model.parameters()).device.type
    peak = matmul_peak(getattr(torch, s.dtype), device)
    work = [(f"recorded {Path(t).stem}", 1, subject.episodes(s.rules[0], t)) for t in s.tasks]
    work += [
        (shape, n, within(episodes_of(shape, n), model.config.vocab_size)) for n in s.multiples for shape in s.shapes
    ]
    results = [run_actor(model, e, name, n, peak, s.repeats) for name, n, e in subject.progress("actor", work)]
    earlier = [(file, [r for r in load(Path(file)) if isinstance(r, ActorResult)]) for file in s.measured]
    body = [
        f"Forward and backward of `{policy_name(s.model, s.adapter)}`, {s.dtype}; time of the best packed arm against "
        "the best exact arm that shares no rows. The limit is what the number of rows alone allows.",
        markdown_table(COLUMNS, [line(r) for r in results]),
    ]
    for file, of_file in earlier:
        body += [f"`{file}`, made by `python -m benchmarks actor --json`: {_setting(file)}.",
                 markdown_table(COLUMNS, [line(r) for r in of_file])]  # fmt: skip
    numbers = {
        "results": [r.as_dict() for r in results],
        "measured": {file: [r.as_dict() for r in of_file] for file, of_file in earlier},
    }
    drawn = [r for _, of_file in earlier for r in of_file] or results  # the larger models, if there are any
    return Findings(numbers, body, lambda output: plot_actor(drawn, output))


COLUMNS = ["calls", "number", "sampled tokens", "best without sharing", "ms", "best packed", "ms", "speed", "limit",
           "time saved"]  # fmt: skip


def line(r: ActorResult) -> list[Any]:
    base = next(a for a in r.arms if a.name == r.baseline)
    packed = min((a for a in r.arms if a.name.startswith("packed") and not a.note), key=lambda a: a.seconds)
    return [
        f"{r.shape} × {r.batch}", r.calls, f"{r.decisions:,}", base.name, f"{1e3 * base.seconds:.1f}", packed.name,
        f"{1e3 * packed.seconds:.1f}", f"{packed.speedup:.2f}×", f"{packed.limit:.2f}×",
        f"{100 * (1 - packed.seconds / base.seconds):.1f} %",
    ]  # fmt: skip


def _setting(file: str) -> str:
    """The setting of a result file of `python -m benchmarks`, which its first line contains."""
    first = json.loads(Path(file).read_text().splitlines()[0])
    return ", ".join(f"{name} {first[name]}" for name in ("model", "dtype", "compiled", "device", "torch"))


def within(episodes: Sequence[Episode], vocabulary: int) -> list[Episode]:
    """Map the random ids of a shape to ids that a small model has."""

    def smaller(call: Call) -> Call:
        return replace(call, prompt=call.prompt % vocabulary, completion=call.completion % vocabulary)

    return [replace(e, calls=tuple(map(smaller, e.calls))) for e in episodes]
