"""Draws a pack: which rows see which, which rows are shared, and where the decisions are.

`python -m memopd.attention.draw` draws the worked example of three calls.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memopd.compile import Packed, compile_calls
from memopd.files import whole
from memopd.types import Call


def call_rows(packed: Packed) -> dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The rows on the path of every call."""
    last = {int(call): int(row) for call, row in zip(packed.decisions.call, packed.decisions.row, strict=True)}
    return {call: packed.path(row) for call, row in last.items()}


def draw(packed: Packed, output: Path, title: str = "") -> None:
    """The visibility matrix. The colour of a row is its call, or grey if several calls share it; dots are decisions."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    T = len(packed)
    paths = call_rows(packed)
    users = np.zeros(T, int)
    owner = np.zeros(T, int)
    for n, rows in enumerate(paths.values()):
        users[rows] += 1
        owner[rows] = n
    colours = plt.get_cmap("tab20")(np.arange(20))[:, :3]
    colour = np.where((users > 1)[:, None], 0.55, colours[owner % 20])  # [T, 3]
    row = np.arange(T)
    sees = (row[None, :] <= row[:, None]) & (row[:, None] < packed.exit[None, :])
    image = np.ones((T, T, 3))
    image[sees] = np.broadcast_to(colour[None], (T, T, 3))[sees]  # in the colour of the visible row

    figure, axes = plt.subplots(figsize=(8, 8.6), layout="constrained")
    axes.imshow(image, interpolation="nearest", origin="upper")
    decided = np.unique(packed.decisions.row)
    size = max(0.4, min(14, 5000 / T**1.2))
    axes.scatter(decided, decided, s=size, c="black", linewidths=0)
    for call, rows in paths.items():
        axes.annotate(
            f"call {call}", (T, rows[-1]), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7,
            annotation_clip=False,
        )  # fmt: skip
    axes.set(xlabel="row k, seen", ylabel="row q, seeing", title=title)
    tokens = sum(len(rows) for rows in paths.values())
    legend = [
        Patch(color=(0.55,) * 3, label=f"shared by several calls ({int((users > 1).sum())} rows)"),
        Patch(color=colours[0], label=f"of one call, one colour per call ({int((users == 1).sum())} rows)"),
        Line2D([], [], marker="o", color="black", ls="", ms=4, label=f"predicts a sampled token ({len(decided)} rows)"),
    ]
    axes.legend(
        handles=legend, loc="upper right", fontsize=8, title=f"{T} rows for {tokens} tokens of {len(paths)} calls"
    )
    with whole(output) as partial:
        figure.savefig(partial, dpi=150, format=output.suffix.lstrip(".") or "png")
    plt.close(figure)


if __name__ == "__main__":
    q, a0, o0, a1, o1, a2 = (np.arange(10 * i, 10 * i + n, dtype=np.int32) for i, n in enumerate([8, 5, 4, 5, 4, 5]))
    example = [Call(q, a0), Call(np.concatenate([q, a0, o0]), a1), Call(np.concatenate([q, a1, o1]), a2)]
    draw(compile_calls(example), Path("pack.png"), "[q] → a0,  [q, a0, o0] → a1,  [q, a1, o1] → a2")
    print("pack.png")
