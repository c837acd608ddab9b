"""The blocks of the documents about speed, from benchmarks/results; `python -m paper.refresh` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.output import markdown, markdown_table
from benchmarks.shapes import SHAPES

RESULTS = Path(__file__).parent / "results"


def fast() -> list[str]:
    """Against the fastest arm that is not ours, shape by shape, and against a row per call."""
    found = [r for r in peer_results() if r["peers_shape"] in SHAPES]
    cells, split = [], []
    for r in found:
        base, ours, rows = (arm_of(r, name) for name in (r["baseline"], "MemOPD", "split rows"))
        cells.append(f"{base['seconds'] / ours['seconds']:.2f}× on {r['peers_shape'].upper()} ({base['name']})")
        split.append(f"{rows['seconds'] / ours['seconds']:.2f}×")
    question = "How fast? Forward + backward, Qwen2.5-3B's shape, one H200, against the fastest of four others"
    return [question, f"**{', '.join(cells)}**; against a row per call {', '.join(split)}"]


def actor() -> str:
    """Speed of one update's forward and backward passes."""
    rows = []
    for line in (RESULTS / "actor-h200.jsonl").read_text().splitlines():
        result = json.loads(line)
        if result["batch"] != 1:
            continue
        name, arms = result["shape"], {a["name"]: a for a in result["arms"]}
        alone, packed = arms["independent, varlen flash"], arms["packed, cascade"]
        others = [arms[f"packed, {kernel}"]["speedup"] for kernel in ("dense mask", "flex")]
        rows.append(
            [f"{name.upper()}: {SHAPES[name].calls} × {SHAPES[name].trajectories}", f"{1e3 * alone['seconds']:.0f} ms",
             *(f"{speed:.2f}×" for speed in others), f"**{packed['speedup']:.2f}×**", f"{packed['limit']:.2f}×",
             f"{packed['memory']:.2f}"]
        )  # fmt: skip
    columns = [
        "calls × trajectories",
        "calls alone",
        "packed, dense mask",
        "packed, flex",
        "packed, cascade",
        "rows allow",
        "memory, of the calls alone",
    ]
    return markdown_table(columns, rows)


def peers() -> str:
    """Every shape against the fastest arm that is not ours; then all arms."""
    found = list(peer_results())
    rows = []
    for r in found:
        base, ours = arm_of(r, r["baseline"]), arm_of(r, "MemOPD")
        rows.append(
            [r["peers_shape"], base["name"], f"{1e3 * base['seconds']:.0f} ms", f"{1e3 * ours['seconds']:.0f} ms",
             f"**{base['seconds'] / ours['seconds']:.2f}×**", f"{ours['peak_bytes'] / max(1, base['peak_bytes']):.2f}",
             f"{1e3 * base['build_seconds']:.0f} / {1e3 * ours['build_seconds']:.0f} ms", f"{ours['error']:.1e}"]
        )  # fmt: skip
    columns = ["calls", "fastest other", "its step", "MemOPD", "speed", "memory, of its", "build", "largest error"]
    left_out = "; ".join(f"{name}: {why}" for name, why in found[0]["not_run"].items())
    said = f"{machine_of(found[0])}. Not measured: {left_out}."
    return "\n\n".join([markdown_table(columns, rows), said, *bench_tables("peers")])


def step() -> str:
    """A run per file; arms are compared within a run alone."""
    made = []
    for path in bench_files("step"):
        first = json.loads(path.read_text().splitlines()[0])
        said = f"[{path.name}](results/{path.name}): {machine_of(first)}, {first['dtype']}, budget {first['budget']:,}."
        made += [said, *tables_in(path)]
    return "\n\n".join(made)


def drift() -> str:
    lines = [json.loads(line) for line in bench_files("drift")[0].read_text().splitlines()]
    picture = bench_files("drift")[0].with_suffix(".png")
    shown = f"![curves and differences](results/{picture.name})"
    return "\n\n".join([f"{machine_of(lines[0])}, {lines[0]['dtype']}.", *bench_tables("drift"), shown])


def bench_files(name: str) -> list[Path]:
    return sorted(RESULTS.glob(f"{name}-*h200.jsonl"))


def bench_tables(name: str) -> list[str]:
    return [made for path in bench_files(name) for made in tables_in(path)]


def tables_in(path: Path) -> list[str]:
    from benchmarks.tables import load, tables_of  # imports torch

    return [markdown(made) for made in tables_of(load(path))]


def peer_results() -> list[dict[str, Any]]:
    return [json.loads(line) for path in bench_files("peers") for line in path.read_text().splitlines()]


def arm_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    arm: dict[str, Any] = next(a for a in result["arms"] if a["name"] == name)
    return arm


def machine_of(line: dict[str, Any]) -> str:
    return f"{line['device']}, torch {line['torch']}, transformers {line['transformers']}"
