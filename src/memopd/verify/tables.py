"""The audit as tables for a terminal, and its findings in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from memopd.verify.audit import Audit, Mismatch, Row
from memopd.verify.distance import CLIP


def print_audit(report: Audit, console: Console) -> None:
    e = report.equivalence
    console.print(
        f"\n[bold]{report.model}[/bold], {e.dtype}, attention {e.attention}: {report.episodes} episodes, "
        f"{report.calls} calls, {e.decisions:,} sampled tokens; {e.rows:,} rows packed for {e.tokens:,} alone "
        f"({e.tokens / e.rows:.2f}×)\n"
    )
    console.print(_table("Against independent calls", representation_cells(report.representations)))
    if report.student:
        console.print(_table("Persistent history, by call", mismatch_cells(report.student)))
    if report.teacher:
        console.print(_table("Teacher in persistent history, by call", mismatch_cells(report.teacher)))
    if report.corruption:
        console.print(_table("Exact rows with a corrupted state", representation_cells(report.corruption)))
    if report.arms:
        console.print(_table("What other trainers do with these calls", arm_cells(report)))
    rules = [
        ["context update", "episodes", "tokens", "p99 |Δlog p|", "max |Δlog p|", "top-1 %"],
        *(
            [r.memory, f"{r.episodes:,}", f"{r.decisions:,}", f"{r.p99_logprob:.3g}", f"{r.max_logprob:.3g}",
             f"{100 * r.top1:.2f}"]
            for r in report.rules
        ),
    ]  # fmt: skip
    console.print(_table("Packed against independent calls, by context update", rules))
    masks = (
        ("sampled actions", 0),
        ("trajectory: all after q", report.domain.trajectory_spurious),
        ("response: all of the assistant turn", report.domain.response_spurious),
    )
    positions = [[mask, f"{report.domain.sampled + spurious:,}", f"{spurious:,}"] for mask, spurious in masks]
    console.print(_table("Which tokens count as decisions", [["mask", "positions", "spurious"], *positions]))
    if report.rounding:
        title = f"Rounding: {e.dtype} against the calls alone in {e.precise}"
        console.print(_table(title, representation_cells(report.rounding)))
        console.print(rounding_in_words(report), soft_wrap=True)
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


def rounding_in_words(report: Audit) -> str:
    """What the precision does by itself, and what packing adds to it."""
    e, own, packed = report.equivalence, report.rounding[0], report.rounding[-1]
    text = (
        f"Floor of {e.dtype}: a call run alone is {own.p99_logprob:.2g} (p99 |Δlog p|) from {e.precise}, and changes "
        f"{100 * (1 - own.top1):.2f} % of its first choices; packed it is {packed.p99_logprob:.2g} and "
        f"{100 * (1 - packed.top1):.2f} %."
    )
    if own.false_clip or packed.false_clip:
        text += (
            f" A ratio between {e.dtype} and {e.precise} would leave 1 ± {CLIP} for {100 * own.false_clip:.2f} % of "
            f"the tokens alone, {100 * packed.false_clip:.2f} % packed, although nothing was learnt: compute both "
            "sides of a ratio in the same way, as `memopd train` does."
        )
    return text


Cells = list[list[str]]  # the first line has the names of the columns


def arm_cells(report: Audit) -> Cells:
    """What other trainers do with the calls, between one sequence per call and our packing."""
    e = report.equivalence
    packed = next(r for r in report.representations if r.representation == "reconstructed packing")
    share = f"{e.tokens / e.rows:.2f}×"
    return [
        ["arm", "sequences", "rows", "saves", "at best", "lost", "p99 |Δlog p|", "changed", "false clip %"],
        ["a sequence per call", f"{report.calls:,}", f"{e.tokens:,}", "1.00×", share, "0", "0", "0", "0.00"],
        *(
            [a.arm, f"{a.sequences:,}", f"{a.rows:,}", f"{e.tokens / a.rows:.2f}×", f"{e.tokens / a.shared_rows:.2f}×",
             f"{a.lost:,}", f"{a.p99_logprob:.3g}", f"{a.top1_changed:,}", f"{100 * a.false_clip:.2f}"]
            for a in report.arms
        ),
        ["MemOPD", "–", f"{e.rows:,}", share, share, "0", f"{packed.p99_logprob:.3g}", f"{packed.top1_changed:,}",
         f"{100 * packed.false_clip:.2f}"],
    ]  # fmt: skip


def mismatch_cells(rows: Sequence[Mismatch]) -> Cells:
    return [
        ["calls", "tokens", "top-1 %", "changed", "p99 |Δlog p|", "mean KL"],
        *(
            [r.calls, f"{r.decisions:,}", f"{100 * r.top1:.2f}", f"{r.top1_changed:,}", f"{r.p99_logprob:.3g}",
             f"{r.mean_kl:.3g}"]
            for r in rows
        ),
    ]  # fmt: skip


def representation_cells(rows: Sequence[Row]) -> Cells:
    return [
        ["representation", "p99 |Δlog p|", "top-1 %", "changed", "false clip %"],
        *(
            [r.representation, f"{r.p99_logprob:.3g}", f"{100 * r.top1:.2f}", f"{r.top1_changed:,}",
             f"{100 * r.false_clip:.2f}"]
            for r in rows
        ),
    ]  # fmt: skip


def _table(title: str, cells: Cells) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(cells[0]):
        table.add_column(column, justify="right" if i else "left")
    for row in cells[1:]:
        table.add_row(*row)
    return table
