"""Results of sampling, retrieval and whole updates as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.engine import EngineResult
from benchmarks.retrieval import RetrievalResult
from benchmarks.retrieval_growth import GrowthResult
from benchmarks.table import cell, table
from benchmarks.update import UpdateResult


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
