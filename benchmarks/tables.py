"""Benchmark results as tables and plots for a person."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.actor import ActorResult, Arm
from benchmarks.attention import AttentionResult
from benchmarks.engine import EngineArm, EngineResult
from benchmarks.head import HeadArm, HeadResult
from benchmarks.rce import RceResult
from benchmarks.retrieval import RetrievalResult
from benchmarks.retrieval_growth import GrowthResult
from benchmarks.service_tables import engine_table, growth_table, retrieval_table, update_table
from benchmarks.table import table
from benchmarks.update import Stage, UpdateResult
from memopd.files import json_lines, whole
from memopd.verify import EquivalenceReport, GradientReport


def load(path: Path) -> list[Any]:
    """Results that a benchmark wrote with --json, one a line."""
    results = []
    for number, values in json_lines(path):
        try:
            results.append(_result(values))
        except (KeyError, StopIteration, TypeError) as why:
            raise ValueError(f"{path}: line {number}: not a result of python -m benchmarks ({why!r})") from None
    return results


def _result(values: dict[str, Any]) -> Any:
    if "kernel" in values:
        return _as(AttentionResult, values)
    if "logits" in values:
        gradients = values["gradients"] and _as(GradientReport, values["gradients"])
        return RceResult(values["model"], values["shape"], _as(EquivalenceReport, values["logits"]), gradients)
    if "retriever" in values:
        return _as(RetrievalResult, values)
    if "build_memory" in values:
        return _as(GrowthResult, values)
    if "stages" in values:
        return _as(UpdateResult, {**values, "stages": tuple(_as(Stage, s) for s in values["stages"])})
    kind, arm = _ARMS[next(key for key in _ARMS if key in values)]
    return _as(kind, {**values, "arms": tuple(_as(arm, a) for a in values["arms"])})


_ARMS: dict[str, tuple[Any, Any]] = {  # by a field that only they have
    "shape": (ActorResult, Arm),
    "vocabulary": (HeadResult, HeadArm),
    "engine_model": (EngineResult, EngineArm),
}


def _as(kind: Any, values: dict[str, Any]) -> Any:
    """null was not measured: NaN here."""
    known = {f.name: values[f.name] for f in fields(kind) if f.name in values}
    return kind(**{name: float("nan") if value is None else value for name, value in known.items()})


def tables_of(results: Sequence[Any]) -> list[Table]:
    made: list[Table] = [actor_table(r) for r in results if isinstance(r, ActorResult)]
    made += [head_table(r) for r in results if isinstance(r, HeadResult)]
    made += [engine_table(r) for r in results if isinstance(r, EngineResult)]
    for kind, table_of in _TOGETHER.items():
        if some := [r for r in results if isinstance(r, kind)]:
            made.append(table_of(some))
    return made


def plot(results: Sequence[Any], output: Path) -> None:
    for kind, draw in ((ActorResult, plot_actor), (HeadResult, plot_head), (AttentionResult, plot_attention)):
        if some := [r for r in results if isinstance(r, kind)]:
            draw(some, output)
            return
    raise ValueError("these results have no plot")


def actor_table(r: ActorResult) -> Table:
    rows = []
    for a in r.arms:
        if a.note:
            rows.append([a.name, f"{a.rows:,}", a.note, *[""] * 6])
            continue
        rows.append(
            [a.name, f"{a.rows:,}", f"{1e3 * a.seconds:.1f}", f"±{50 * a.spread:.1f} %", f"{a.speedup:.2f}×",
             f"{a.limit:.2f}×", f"{100 * a.share:.1f} %", f"{a.peak_bytes / 2**30:.1f} ({a.memory:.2f})",
             f"{100 * a.utilisation:.0f} %"]
        )  # fmt: skip
    extra = ", gradient checkpointing" if r.checkpointing else ""
    title = f"{r.shape} × {r.batch}: {r.calls} calls, {r.decisions:,} sampled tokens{extra}"
    columns = ["arm", "rows", "ms", "spread", "speed", "limit", "reached", "GiB (of baseline)", "utilisation"]
    return table(title, columns, rows)


def head_table(r: HeadResult) -> Table:
    rows = [
        [a.name, a.computes, a.note or f"{1e3 * a.seconds:.1f}", f"{a.added_bytes / 1e9:.2f}",
         "" if a.products != a.products else f"{a.products:.2f}×"]
        for a in r.arms
    ]  # fmt: skip
    title = (
        f"{r.decisions:,} decisions, vocabulary {r.vocabulary:,}, widths {r.width:,} and {r.teacher_width:,}; "
        f"matrix products alone {1e3 * r.product_seconds:.1f} ms"
    )
    return table(title, ["arm", "computes", "ms", "GB added", "of its products"], rows)


def attention_table(results: Sequence[AttentionResult]) -> Table:
    kernels = list(dict.fromkeys(r.kernel for r in results))
    by_trie: dict[tuple[str, int, int, int], dict[str, str]] = {}
    for r in results:
        cell = "–" if r.seconds != r.seconds else f"{1e3 * r.seconds:.2f}{' *' if r.chosen else ''}"
        by_trie.setdefault((r.trie, r.rows, r.depth, r.leaves), {})[r.kernel] = cell
    rows = [[t, f"{n:,}", d, c, *(cells.get(k, "–") for k in kernels)] for (t, n, d, c), cells in by_trie.items()]
    title = "attention, forward + backward, ms (* what cascade chooses)"
    return table(title, ["trie", "rows", "depth", "calls", *kernels], rows)


def rce_table(results: Sequence[RceResult]) -> Table:
    rows = []
    for r in results:
        e, g = r.logits, r.gradients
        gradient = (
            ["", "", "", ""]
            if g is None
            else [f"{g.difference:.1e}", f"{g.reordering:.1e}", f"{g.batching:.1e}", "yes" if g.passed else "NO"]
        )
        rows.append(
            [f"{r.shape}, {e.attention}", e.dtype, f"{e.p99_logprob_error:.1e}", f"{e.floor_p99_logprob_error:.1e}",
             f"{100 * e.top1_agreement:.2f}", f"{100 * e.false_clip:.2f}", f"{e.error:.1e} / {e.tolerance:.1e}",
             "yes" if e.passed else "NO", *gradient]
        )  # fmt: skip
    columns = ["", "dtype", "p99 |Δlog p|", "batching floor", "top-1 %", "false clip %", "error / tolerance", "passed",
               "gradient Δ", "reordered Δ", "batched Δ", "passed"]  # fmt: skip
    return table("packed against each call alone", columns, rows)


_TOGETHER: dict[type, Any] = {  # kinds whose results share one table
    AttentionResult: attention_table,
    RceResult: rce_table,
    RetrievalResult: retrieval_table,
    GrowthResult: growth_table,
    UpdateResult: update_table,
}


def plot_actor(results: Sequence[ActorResult], output: Path) -> None:
    """Speed of every arm against the strongest exact arm without sharing, with the limit of its rows."""
    plt = _pyplot()
    names = list(dict.fromkeys(a.name for r in results for a in r.arms))
    figure, axes = plt.subplots(figsize=(max(6, 1.6 * len(results) + 2), 4), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        arms = [next((a for a in r.arms if a.name == name), None) for r in results]
        at = [x + i * width for x in range(len(results))]
        axes.bar(at, [0 if a is None or a.note else a.speedup for a in arms], width, label=name)
        if name == "packed, cascade":
            for x, a in zip(at, arms, strict=True):
                if a is not None:
                    axes.hlines(a.limit, x - width / 2, x + width / 2, color="black", lw=1.5)
    axes.axhline(1, color="grey", lw=0.7)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(results))], [f"{r.shape} × {r.batch}" for r in results])
    axes.set_ylabel("speed, of the best unshared arm")
    axes.set_title("black: what the number of rows allows", fontsize=9)
    axes.legend(fontsize=7)
    _save(figure, output)


def plot_attention(results: Sequence[AttentionResult], output: Path) -> None:
    plt = _pyplot()
    depths = sorted({r.depth for r in results if r.trie == "balanced"})
    figure, grid = plt.subplots(1, len(depths), figsize=(4 * len(depths), 3.6), layout="constrained", squeeze=False)
    for axes, depth in zip(grid[0], depths, strict=True):
        here = [r for r in results if r.depth == depth and r.trie == "balanced"]
        few = min(r.leaves for r in here)
        for kernel in dict.fromkeys(r.kernel for r in here):
            line = sorted((r.rows, 1e3 * r.seconds) for r in here if r.kernel == kernel and r.leaves == few)
            axes.loglog([x for x, _ in line], [y for _, y in line], marker="o", ms=3, label=kernel)
        axes.set(title=f"depth {depth}, {few} calls", xlabel="rows", ylabel="ms, forward + backward")
    grid[0][0].legend(fontsize=7)
    _save(figure, output)


def plot_head(results: Sequence[HeadResult], output: Path) -> None:
    plt = _pyplot()
    figure, (time, memory) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    labels = [f"{a.name}\n{r.width}/{r.teacher_width}" for r in results for a in r.arms]
    arms = [a for r in results for a in r.arms]
    time.barh(labels, [1e3 * a.seconds for a in arms])
    memory.barh(labels, [a.added_bytes / 1e9 for a in arms], color="tab:orange")
    memory.set_yticklabels([])
    time.set_xlabel("ms, forward + backward")
    memory.set_xlabel("GB added")
    time.tick_params(labelsize=7)
    _save(figure, output)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, output: Path) -> None:
    with whole(output) as partial:
        figure.savefig(partial, dpi=150, format=output.suffix.lstrip(".") or "png")
    _pyplot().close(figure)
