"""Shows benchmark results as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.actor import ActorResult, Arm
from benchmarks.attention import AttentionResult
from benchmarks.engine import EngineArm, EngineResult
from benchmarks.growth import GrowthResult
from benchmarks.head import HeadArm, HeadResult
from benchmarks.lora import LoraResult
from benchmarks.output import cell, pyplot, save, table
from benchmarks.rce import RceResult
from benchmarks.retrieval import RetrievalResult
from benchmarks.update import Stage, UpdateResult
from memopd.files import json_lines
from memopd.verify import EquivalenceReport, GradientReport


def load(path: Path) -> list[Any]:
    """Read the results that a benchmark wrote with --json, one per line."""
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
    if "lora_rank" in values:
        return _as(LoraResult, {**values, "stages": tuple(_as(Stage, s) for s in values["stages"])})
    if "stages" in values:
        return _as(UpdateResult, {**values, "stages": tuple(_as(Stage, s) for s in values["stages"])})
    kind, arm = _ARMS[next(key for key in _ARMS if key in values)]
    return _as(kind, {**values, "arms": tuple(_as(arm, a) for a in values["arms"])})


_ARMS: dict[str, tuple[Any, Any]] = {  # by a field that only this kind has
    "shape": (ActorResult, Arm),
    "vocabulary": (HeadResult, HeadArm),
    "engine_model": (EngineResult, EngineArm),
}


def _as(kind: Any, values: dict[str, Any]) -> Any:
    """Make a result of one kind. null, which stands for a missing measurement, becomes NaN."""
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
    for kind, draw in _PLOTS.items():
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


def engine_table(r: EngineResult) -> Table:
    rows = [
        [a.name, a.note or f"{a.seconds:.2f}", cell(50 * a.spread, "±{:.1f} %"), cell(a.processor_seconds, "{:.2f}"),
         cell(a.tokens_per_second, "{:,.0f}"), cell(a.speedup, "{:.2f}×")]
        for a in r.arms
    ]  # fmt: skip
    title = (
        f"{r.engine_model}, {r.parameters / 1e6:.1f} M parameters: {r.prompts} prompts of {r.shortest} to {r.longest} "
        f"ids, {r.sampled_tokens:,} sampled, {r.threads} threads"
    )
    return table(title, ["sampler", "s", "spread", "CPU s", "tokens/s", "speed"], rows)


def retrieval_table(results: Sequence[RetrievalResult]) -> Table:
    rows = [
        [r.retriever, f"{r.passages:,}", cell(r.build_seconds), f"{r.disk_bytes / 1e6:,.1f}",
         *(cell(1e3 * x, "{:.2f}") for x in (r.p50, r.p99, r.cpu)), cell(r.queries_per_second, "{:,.0f}"),
         *(cell(x, "{:.3f}") for x in (r.recall_3, r.recall_5, r.recall_10))]
        for r in results
    ]  # fmt: skip
    columns = [
        "retriever",
        "passages",
        "build s",
        "MB",
        "p50 ms",
        "p99 ms",
        "CPU ms",
        "queries/s",
        "recall@3",
        "@5",
        "@10",
    ]
    return table(f"{results[0].queries:,} queries", columns, rows)


def growth_table(results: Sequence[GrowthResult]) -> Table:
    rows = [
        [f"{r.passages:,}", f"{r.corpus_bytes / 1e6:,.0f}", f"{r.index_bytes / 1e6:,.0f}", f"{r.build_seconds:.1f}",
         f"{r.build_cpu:.1f}", f"{r.build_memory / 1e6:,.0f}", f"{1e3 * r.p50:.2f}", f"{1e3 * r.p99:.2f}",
         f"{1e3 * r.cpu:.2f}", f"{r.search_memory / 1e6:,.0f}"]
        for r in results
    ]  # fmt: skip
    columns = ["passages", "corpus MB", "index MB", "build s", "CPU s", "memory MB", "p50 ms", "p99 ms", "CPU ms",
               "search MB"]  # fmt: skip
    return table("a lexical index as its corpus grows", columns, rows)


def update_table(results: Sequence[UpdateResult]) -> Table:
    names = [s.name for s in results[0].stages]
    rows = []
    for i, name in enumerate(names):
        cells = [(r.stages[i].seconds, r.stages[i].peak_bytes) for r in results]
        rows.append([name, *(f"{s:.2f} ({b / 2**30:.0f} GiB)" for s, b in cells)])
    peaks = [max(s.peak_bytes for s in r.stages) for r in results]
    whole = [f"{r.seconds:.2f} ({b / 2**30:.0f} GiB)" for r, b in zip(results, peaks, strict=True)]
    rows.append(["whole update", *whole])
    r = results[0]
    title = (
        f"{r.student} student and critic, {r.teacher} teacher: {r.episodes} episodes, {r.calls} calls, "
        f"{r.decisions:,} sampled tokens; seconds (peak memory)"
    )
    return table(title, ["stage", *(f"{r.layout}, {r.rows:,} rows" for r in results)], rows)


def lora_table(results: Sequence[LoraResult]) -> Table:
    """Memory by part, then seconds (and the peak of the device's memory) by stage."""
    parts = {
        "weights on the device": "weights_bytes",
        "copy that the engine samples from": "copy_bytes",
        "optimisers": "optimiser_bytes",
        "engine's cache": "cache_bytes",
        "activations and gradients of the update": "activation_bytes",
        "frozen weights in host memory": "host_bytes",
    }
    rows: list[list[str]] = [["trained weights", *(f"{r.trained / 1e6:.1f} M" for r in results)]]
    rows += [[f"{name}, GiB", *(f"{getattr(r, field) / 2**30:.2f}" for r in results)] for name, field in parts.items()]
    for stages in zip(*(r.stages for r in results), strict=True):
        cells = [f"{s.seconds:.2f} ({s.peak_bytes / 2**30:.1f} GiB)" for s in stages]
        rows.append([f"{stages[0].name}, s (peak)", *cells])
    r = results[0]
    title = f"{r.student} student and critic, {r.teacher} teacher: {r.episodes} episodes, {r.calls} calls per step"
    names = [f"LoRA, rank {r.lora_rank}" if r.lora_rank else "all weights" for r in results]
    return table(title, ["", *names], rows)


_TOGETHER: dict[type, Any] = {  # kinds whose results share one table
    AttentionResult: attention_table,
    RceResult: rce_table,
    RetrievalResult: retrieval_table,
    GrowthResult: growth_table,
    UpdateResult: update_table,
    LoraResult: lora_table,
}


def plot_actor(results: Sequence[ActorResult], output: Path) -> None:
    """The speed of every arm relative to the best exact arm without sharing, with the limit that its rows set."""
    plt = pyplot()
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
    save(figure, output)


def plot_attention(results: Sequence[AttentionResult], output: Path) -> None:
    plt = pyplot()
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
    save(figure, output)


def plot_head(results: Sequence[HeadResult], output: Path) -> None:
    plt = pyplot()
    figure, (time, memory) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    labels = [f"{a.name}\n{r.width}/{r.teacher_width}" for r in results for a in r.arms]
    arms = [a for r in results for a in r.arms]
    time.barh(labels, [1e3 * a.seconds for a in arms])
    memory.barh(labels, [a.added_bytes / 1e9 for a in arms], color="tab:orange")
    memory.set_yticklabels([])
    time.set_xlabel("ms, forward + backward")
    memory.set_xlabel("GB added")
    time.tick_params(labelsize=7)
    save(figure, output)


_PLOTS: dict[type, Any] = {ActorResult: plot_actor, HeadResult: plot_head, AttentionResult: plot_attention}
