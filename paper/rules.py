"""Table 4: rollout context equivalence under every context-update rule, on the student's rollouts under that rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table, pyplot, save
from memopd.verify.equivalence import equivalence
from paper.page import Findings
from paper.trajectories import Subject, counts


def findings(subject: Subject) -> Findings:
    s = subject.settings
    found: dict[str, dict[str, Any]] = {}
    sampled = {rule: subject.episodes(rule) for rule in s.rules}
    for rule, episodes in subject.progress("equivalence", list(sampled.items())):
        report = equivalence(subject.model, [c for e in episodes for c in e.calls])
        found[rule] = {**counts(episodes), **report.as_dict()}
    rows = [
        [rule, r["calls"], f"{r['decisions']:,}", f"{r['p99_logprob_error']:.2e}",
         f"{r['floor_p99_logprob_error']:.2e}", f"{100 * r['top1_agreement']:.2f}", f"{100 * r['false_clip']:.2f}",
         f"{r['error']:.1e} / {r['tolerance']:.1e}", "yes" if r["passed"] else "NO", f"{r['tokens'] / r['rows']:.2f}×"]
        for rule, r in found.items()
    ]  # fmt: skip
    columns = ["context update", "calls", "tokens", "p99 |Δlog p| ↓", "batching floor", "top-1 % ↑",
               "false clip % ↓", "error / tolerance", "RCE", "rows shared"]  # fmt: skip
    body = [
        f"`{s.model}` sampled {s.trajectories} trajectories under each rule; {s.dtype}. Packed against every call run "
        "alone. Error and tolerance are of logits: the tolerance is twice the calls' own error against a more precise "
        "run.",
        markdown_table(columns, rows),
    ]
    return Findings(
        {"rules": found}, body, lambda output: _draw(found, output), all(r["passed"] for r in found.values())
    )


def _draw(found: dict[str, dict[str, Any]], output: Path) -> None:
    figure, axes = pyplot().subplots(figsize=(7, 3.4), layout="constrained")
    axes.barh(list(found), [r["p99_logprob_error"] for r in found.values()], color="tab:blue", label="packed")
    floors = [r["floor_p99_logprob_error"] for r in found.values()]
    axes.scatter(floors, range(len(found)), marker="|", s=200, color="black", label="batching floor", zorder=2)
    axes.invert_yaxis()
    axes.set(xlabel="p99 |Δlog p| against the calls alone", title="rollout context equivalence, by context update")
    axes.legend()
    save(figure, output)
