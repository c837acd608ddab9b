"""Shows benchmark results as tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.actor import ActorResult, Arm
from benchmarks.attention import AttentionResult
from benchmarks.audit import AuditResult, AuditStage
from benchmarks.drift import DriftStep
from benchmarks.engine import EngineArm, EngineResult
from benchmarks.growth import GrowthResult
from benchmarks.head import HeadArm, HeadResult
from benchmarks.host import HostResult
from benchmarks.output import cell, pyplot, save, table
from benchmarks.peers import PeerArm, PeersResult
from benchmarks.rce import RceResult
from benchmarks.recall import RecallResult
from benchmarks.retrieval import RetrievalResult
from benchmarks.step import StepResult, StepStage
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
    if "any_3" in values:
        return _as(RecallResult, values)
    if "build_memory" in values:
        return _as(GrowthResult, values)
    if "host_arm" in values:
        return _as(HostResult, values)
    if "drift_step" in values:
        return _as(DriftStep, values)
    if "step_arm" in values:
        return _as(StepResult, {**values, "stages": tuple(_as(StepStage, s) for s in values["stages"])})
    if "audit_stages" in values:
        stages = tuple(_as(AuditStage, s) for s in values["audit_stages"])
        ways = {way: _as(AuditStage, values[way]) for way in ("one_pass", "pair_by_pair")}
        return _as(AuditResult, {**values, **ways, "audit_stages": stages})
    if "stages" in values:
        return _as(UpdateResult, {**values, "stages": tuple(_as(Stage, s) for s in values["stages"])})
    kind, arm = _ARMS[next(key for key in _ARMS if key in values)]
    return _as(kind, {**values, "arms": tuple(_as(arm, a) for a in values["arms"])})


_ARMS: dict[str, tuple[Any, Any]] = {  # by a field that only this kind has
    "peers_shape": (PeersResult, PeerArm),
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
    made += [peers_table(r) for r in results if isinstance(r, PeersResult)]
    made += [head_table(r) for r in results if isinstance(r, HeadResult)]
    made += [engine_table(r) for r in results if isinstance(r, EngineResult)]
    made += [audit_table(r) for r in results if isinstance(r, AuditResult)]
    if steps := [r for r in results if isinstance(r, StepResult)]:
        made += step_tables(steps)
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


def peers_table(r: PeersResult) -> Table:
    """Speed and memory are relative to the fastest arm that is not ours."""
    base = next(a for a in r.arms if a.name == r.baseline)
    rows = []
    for a in r.arms:
        if a.seconds != a.seconds:
            rows.append([a.name, a.note, *[""] * 6])
            continue
        memory = f"{a.peak_bytes / 2**30:.1f} ({a.peak_bytes / base.peak_bytes:.2f})" if base.peak_bytes else "–"
        rows.append(
            [a.name, f"{a.rows:,}", f"{1e3 * a.build_seconds:.1f}", f"{1e3 * a.seconds:.1f}", f"±{50 * a.spread:.1f} %",
             f"{base.seconds / a.seconds:.2f}×", memory, f"{a.error:.1e}"]
        )  # fmt: skip
    extra = ", gradient checkpointing" if r.checkpointing else ""
    title = f"{r.peers_shape} × {r.batch}: {r.calls} calls, {r.tokens:,} tokens, {r.decisions:,} sampled{extra}"
    columns = ["arm", "rows", "build ms", "step ms", "spread", "speed", "GiB (of baseline)", "largest |Δlog p|"]
    return table(title, columns, rows)


def audit_table(r: AuditResult) -> Table:
    rows = [[s.name, f"{s.seconds:.1f}", f"{s.cpu:.1f}"] for s in (*r.audit_stages, r.one_pass, r.pair_by_pair)]
    title = f"{r.audited}: {r.calls} calls, {r.decisions:,} sampled tokens, {r.rows:,} rows packed"
    return table(title, ["stage", "seconds", "seconds of CPU"], rows)


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


def recall_table(results: Sequence[RecallResult]) -> Table:
    """A row for each index and query; a data set's cell has the share with any gold passage, and that with all."""
    sets = list(dict.fromkeys((r.data_set, r.questions) for r in results))
    share = {(r.index_kind, r.passages, r.query, r.data_set): f"{r.any_3:.2f} / {r.all_3:.2f}" for r in results}
    arms = dict.fromkeys((r.index_kind, r.passages, r.query) for r in results)
    rows = [[a[0], f"{a[1]:,}", a[2], *(share.get((*a, name), "") for name, _ in sets)] for a in arms]
    headings = [f"{name}, {count}" for name, count in sets]
    return table("gold among the first three: any / all", ["index", "passages", "query", *headings], rows)


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


def step_tables(results: Sequence[StepResult]) -> list[Table]:
    """Seconds by stage and updates per hour, memory by part, and what a profile found."""
    names = [f"{r.step_arm}, {r.tree}" if r.tree != "here" else r.step_arm for r in results]
    stages = dict.fromkeys(s.name for r in results for s in r.stages)
    rows = []
    for name in stages:
        found = [next((s for s in r.stages if s.name == name), None) for r in results]
        cells = ["–" if s is None else f"{s.seconds:.2f}" for s in found]
        peaks = ["" if s is None or not s.peak_bytes else f" ({s.peak_bytes / 2**30:.1f} GiB)" for s in found]
        rows.append([f"{name}, s", *map("".join, zip(cells, peaks, strict=True))])
    rows.append(["whole update, s", *(f"{r.seconds:.2f}" for r in results)])
    rows.append(["updates per hour", *(f"{r.per_hour:,.0f}" for r in results)])
    rows.append(["rows saved", *(f"{100 * r.rows_saved:.0f} %" for r in results)])
    r = results[0]
    critic = "with a critic" if r.critic else "no critic"
    title = (
        f"{r.student} student, {r.teacher} teacher, {critic}: {r.episodes} episodes per update; seconds (peak memory)"
    )
    made = [table(title, ["", *names], rows)]
    parts = {
        "weights on the device": "weights_bytes",
        "copy that the engine samples from": "copy_bytes",
        "optimisers": "optimiser_bytes",
        "engine's cache": "cache_bytes",
        "activations and gradients of the update": "activation_bytes",
        "frozen weights in host memory": "host_bytes",
    }
    rows = [["trained weights", *(f"{r.memory['trained'] / 1e6:.1f} M" for r in results)]]
    for name, key in parts.items():
        rows.append([f"{name}, GiB", *(f"{r.memory.get(key, 0) / 2**30:.2f}" for r in results)])
    made.append(table("memory by part", ["", *names], rows))
    for name, result in zip(names, results, strict=True):
        made += profile_tables(name, result)
    return made


def profile_tables(name: str, r: StepResult) -> list[Table]:
    """Seconds by class of kernel in every stage, and the sampler beside what reading its bytes once takes."""
    made = []
    if r.kernels:
        stages = [s for s in r.kernels if s != "check"]
        classes = dict.fromkeys(c for s in stages for c in r.kernels[s]["classes"])
        rows = [[c, *(f"{r.kernels[s]['classes'].get(c, 0.0):.2f}" for s in stages)] for c in classes]
        rows.append(["stage, profiled", *(f"{r.kernels[s]['wall']:.2f}" for s in stages)])
        made.append(table(f"{name}: seconds of kernels by class", ["class", *stages], rows))
    if r.sampler:
        rows = [
            [f"{b['sequences']:.0f}", f"{b['mean_live']:.1f}", f"{b['steps']:.0f}", f"{b['step_ms']:.2f}",
             f"{b['bound_ms']:.2f}", f"{b['of_bound']:.2f}×"]
            for b in r.sampler
        ]  # fmt: skip
        title = f"{name}: decoding, against weights and caches read once at {r.sampler[0]['bandwidth'] / 1e12:.2f} TB/s"
        made.append(table(title, ["sequences up to", "running", "steps", "ms per step", "bound ms", "of bound"], rows))
    return made


def host_table(results: Sequence[HostResult]) -> Table:
    rows = [
        [r.host_arm, r.layers, r.adapters, f"{1e3 * r.forward:.1f}", f"{1e3 * r.training:.1f}"] for r in results
    ]  # fmt: skip
    return table("ms of the host per pass", ["arm", "layers", "adapters", "forward", "forward + backward"], rows)


def drift_table(results: Sequence[DriftStep]) -> Table:
    """Ten updates spread over the run; the last one is always there."""
    shown = sorted({*range(0, len(results), max(1, len(results) // 10)), len(results) - 1})
    rows = [
        [str(r.drift_step + 1), f"{r.sampled:,}", f"{r.largest:.1e}", f"{r.p99:.1e}", f"{r.mean:.1e}",
         f"{cell(r.packed_kl, '{:.4f}')} / {cell(r.unshared_kl, '{:.4f}')}",
         f"{cell(r.packed_reward, '{:.2f}')} / {cell(r.alone_reward, '{:.2f}')}"]
        for r in (results[i] for i in shown)
    ]  # fmt: skip
    columns = ["update", "tokens", "largest |Δlog p|", "p99", "mean", "teacher KL: packed / unshared",
               "reward: packed / unshared, own samples"]  # fmt: skip
    return table(f"{len(results)} updates, packed and unshared", columns, rows)


_TOGETHER: dict[type, Any] = {  # kinds whose results share one table
    AttentionResult: attention_table,
    RceResult: rce_table,
    RetrievalResult: retrieval_table,
    RecallResult: recall_table,
    GrowthResult: growth_table,
    UpdateResult: update_table,
    DriftStep: drift_table,
    HostResult: host_table,
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


def plot_drift(results: Sequence[DriftStep], output: Path) -> None:
    """The curves of both runs over each other, and how far their log-probabilities are apart."""
    plt = pyplot()
    figure, (kl, reward, off) = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    steps = [r.drift_step + 1 for r in results]
    kl.plot(steps, [r.packed_kl for r in results], label="packed")
    kl.plot(steps, [r.unshared_kl for r in results], "--", label="unshared, same episodes")
    kl.set(xlabel="update", ylabel="divergence from the teacher")
    window = max(1, len(results) // 20)
    for values, label in (
        ([r.packed_reward for r in results], "packed"),
        ([r.alone_reward for r in results], "unshared, own samples"),
    ):
        means = [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]
        reward.plot(steps, means, label=label)
    reward.set(xlabel="update", ylabel=f"reward, mean of {window} updates")
    for name in ("largest", "p99", "mean"):
        off.semilogy(steps, [getattr(r, name) for r in results], label=name)
    off.set(xlabel="update", ylabel="|Δlog p|, same calls")
    for axes in (kl, reward, off):
        axes.legend(fontsize=7)
    save(figure, output)


_PLOTS: dict[type, Any] = {
    ActorResult: plot_actor,
    HeadResult: plot_head,
    AttentionResult: plot_attention,
    DriftStep: plot_drift,
}
