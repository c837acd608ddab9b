"""An audit as tables for a person."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from memopd.verify.audit import Audit, Row


def print_audit(report: Audit, console: Console) -> None:
    e = report.equivalence
    console.print(
        f"\n[bold]{report.model}[/bold], {e.dtype}, attention {e.attention}: {report.episodes} episodes, "
        f"{report.calls} calls, {e.decisions:,} sampled tokens; {e.rows:,} rows packed for {e.tokens:,} alone "
        f"({e.tokens / e.rows:.2f}×)\n"
    )
    console.print(_representations("Against independent calls", report.representations))
    if report.corruption:
        console.print(_representations("Exact rows with a corrupted state", report.corruption))
    rules = Table(title="Packed against independent calls, by context update", title_justify="left")
    for column in ("context update", "episodes", "tokens", "p99 |Δlog p|", "max |Δlog p|", "top-1 %"):
        rules.add_column(column, justify="left" if column == "context update" else "right")
    for r in report.rules:
        rules.add_row(
            r.memory, f"{r.episodes:,}", f"{r.decisions:,}", f"{r.p99_logprob:.3g}", f"{r.max_logprob:.3g}",
            f"{100 * r.top1:.2f}",
        )  # fmt: skip
    console.print(rules)
    domain = Table(title="Which tokens count as decisions", title_justify="left")
    domain.add_column("mask")
    domain.add_column("positions", justify="right")
    domain.add_column("spurious", justify="right")
    for mask, spurious in (
        ("sampled actions", 0),
        ("trajectory: all after q", report.domain.trajectory_spurious),
        ("response: all of the assistant turn", report.domain.response_spurious),
    ):
        domain.add_row(mask, f"{report.domain.sampled + spurious:,}", f"{spurious:,}")
    console.print(domain)
    if report.teacher:
        teacher = Table(title="Teacher: exact against persistent states", title_justify="left")
        for column in ("calls", "decisions", "top-1 %", "changed", "p99 |Δlog p|", "mean KL"):
            teacher.add_column(column, justify="left" if column == "calls" else "right")
        for t in report.teacher:
            teacher.add_row(
                t.when, f"{t.decisions:,}", f"{100 * t.top1:.2f}", f"{t.top1_changed:,}",
                f"{t.p99_logprob:.3g}", f"{t.mean_kl:.3g}",
            )  # fmt: skip
        console.print(teacher)
    if (gap := report.recorded) is not None:
        console.print(
            f"Recorded against recomputed log-probabilities, {gap.decisions:,} tokens: "
            f"mean |Δ| {gap.mean:.2e}, p99 {gap.p99:.2e}, k3 {gap.k3:.2e}"
        )
    for note in (*report.notes, *e.problems):
        console.print(f"[yellow]{note}[/yellow]")
    verdict = "[green]equivalent[/green]" if e.passed else "[red]NOT EQUIVALENT[/red]"
    console.print(
        f"Packing is {verdict}: error {e.error:.2e}, tolerance {e.tolerance:.2e} ({e.tolerance_source}); "
        f"worst at call {e.worst_call}, token {e.worst_position}",
        soft_wrap=True,
    )


def _representations(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("representation")
    for column in ("p99 |Δlog p|", "top-1 %", "changed", "false clip %"):
        table.add_column(column, justify="right")
    for r in rows:
        table.add_row(
            r.representation, f"{r.p99_logprob:.3g}", f"{100 * r.top1:.2f}", f"{r.top1_changed:,}",
            f"{100 * r.false_clip:.2f}",
        )  # fmt: skip
    return table
