"""Figure b: the visibility or the positions are corrupted, while the recorded actions stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.output import markdown_table, pyplot, save
from memopd.verify.audit import Row, audit
from paper.page import Findings
from paper.trajectories import Subject, counts, sentence


def findings(subject: Subject) -> Findings:
    s = subject.settings
    episodes = subject.episodes(s.rules[0])
    found = audit(subject.model, episodes, name=s.model, progress=subject.progress)
    exact = [r for r in found.representations if r.representation == "reconstructed packing"]
    rows = [*exact, *found.corruption]
    counted = counts(episodes)
    table = [
        [r.representation, f"{r.p99_logprob:.3g}", f"{r.top1_changed:,}", f"{100 * r.top1:.2f}",
         f"{100 * r.false_clip:.2f}"]
        for r in rows
    ]  # fmt: skip
    numbers = {**counted, "rows": [asdict(r) for r in rows], "equivalence": found.equivalence.as_dict()}
    body = [
        sentence(s, counted) + " Exact rows whose visibility or positions are made wrong, against the calls run alone.",
        markdown_table(["state", "p99 |Δlog p|", "first choices changed", "top-1 %", "false clip %"], table),
    ]
    return Findings(numbers, body, lambda output: _draw(rows, output), found.passed)


def _draw(rows: Sequence[Row], output: Path) -> None:
    names = [r.representation for r in rows]
    panels = (
        ("p99 |Δlog p|", [r.p99_logprob for r in rows]),
        ("first choices changed", [float(r.top1_changed) for r in rows]),
        ("falsely clipped, %", [100 * r.false_clip for r in rows]),
    )
    figure, axes = pyplot().subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for axis, (title, values) in zip(axes, panels, strict=True):
        axis.bar(names, values, color=["tab:blue", *["tab:red"] * (len(rows) - 1)])
        axis.set_title(title)
        axis.set_xticks(range(len(names)), names, rotation=25, ha="right")
    save(figure, output)
