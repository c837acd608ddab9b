"""Table 4: rollout context equivalence under every context-update rule, on the same recorded actions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table, pyplot, save
from memopd.verify.equivalence import at_precision, equivalence
from paper.page import Findings
from paper.trajectories import Subject, counts

NATIVE = "mem1"  # the rule under which the actions were sampled


def findings(subject: Subject) -> Findings:
    import torch

    s = subject.settings
    recorded = subject.episodes(NATIVE)
    models = {s.dtype: subject.model, "bfloat16": at_precision(subject.model, torch.bfloat16)}
    found: dict[str, dict[str, Any]] = {}
    for rule in s.rules:
        episodes = recorded if rule == NATIVE else subject.replayed(rule, recorded)
        calls = [c for e in episodes for c in e.calls]
        made = {dtype: equivalence(model, calls) for dtype, model in subject.progress(rule, list(models.items()))}
        found[rule] = {**counts(episodes), **{dtype: report.as_dict() for dtype, report in made.items()}}
    body = [
        f"`{s.model}` sampled {s.trajectories} trajectories under `{NATIVE}`. Every rule gets the same actions and "
        "makes of them the contexts that it would have made; `refresh` searches again. Packed against every call run "
        "alone. Beside it are the calls in a padded batch, against the calls alone (batching floor), and the calls "
        "alone, against a more precise run (own rounding). Error and tolerance are of logits: the tolerance is twice "
        "the calls' own largest error."
    ]
    for dtype in models:
        reports = {rule: of_rule[dtype] for rule, of_rule in found.items()}
        body += [f"{dtype}, own rounding against {next(iter(reports.values()))['precise']}:", _table(reports)]
    passed = all(reports[dtype]["passed"] for reports in found.values() for dtype in models)
    numbers = {"rules": found, "sampled_with": subject.sampled_with(NATIVE)}
    return Findings(numbers, body, lambda output: _draw(found, list(models), output), passed)


def _table(reports: dict[str, dict[str, Any]]) -> str:
    columns = ["context update", "calls", "tokens", "p99 |Δlog p| ↓", "batching floor", "own rounding", "top-1 % ↑",
               "batching floor", "own rounding", "false clip % ↓", "error / tolerance", "RCE",
               "rows shared"]  # fmt: skip
    kinds = ("", "floor_", "own_")
    rows = [
        [rule, r["calls"], f"{r['decisions']:,}", *(f"{r[f'{kind}p99_logprob_error']:.2e}" for kind in kinds),
         *(f"{100 * r[f'{kind}top1_agreement']:.2f}" for kind in kinds), f"{100 * r['false_clip']:.2f}",
         f"{r['error']:.1e} / {r['tolerance']:.1e}", "yes" if r["passed"] else "NO", f"{r['tokens'] / r['rows']:.2f}×"]
        for rule, r in reports.items()
    ]  # fmt: skip
    return markdown_table(columns, rows)


def _draw(found: dict[str, dict[str, Any]], dtypes: list[str], output: Path) -> None:
    figure, panels = pyplot().subplots(1, len(dtypes), figsize=(10, 3.4), layout="constrained", sharey=True)
    for axes, dtype in zip(panels, dtypes, strict=True):
        reports = [r[dtype] for r in found.values()]
        packed = [r["p99_logprob_error"] for r in reports]
        axes.barh(list(found), packed, color="tab:blue", label="packed, from the calls alone")
        for name, key, colour in (("batching floor", "floor", "black"), ("own rounding", "own", "tab:red")):
            values = [r[f"{key}_p99_logprob_error"] for r in reports]
            axes.scatter(values, range(len(found)), marker="|", s=200, color=colour, label=name, zorder=2)
        axes.set(xlabel="p99 |Δlog p|", title=dtype)
    panels[0].invert_yaxis()
    panels[-1].legend()
    save(figure, output)
