"""The positions that a mask would train on: the sampled actions, and those that the two usual masks add."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.output import markdown_table, pyplot, save
from memopd.verify.audit import domain
from paper.page import Findings
from paper.trajectories import Subject, counts, sentence


def findings(subject: Subject) -> Findings:
    s = subject.settings
    episodes = subject.episodes(s.rules[0])
    found, counted = domain(episodes), counts(episodes)
    masks = {
        "sampled actions (MemOPD)": 0,
        "trajectory: every token after q of the flattened history": found.trajectory_spurious,
        "response: everything in the assistant turn of every call": found.response_spurious,
    }
    rows = [[name, f"{found.sampled + extra:,}", f"{extra:,}", f"{extra / found.sampled:.2f}"]
            for name, extra in masks.items()]  # fmt: skip
    body = [sentence(s, counted), markdown_table(["mask", "positions", "spurious", "spurious per sampled"], rows)]

    def draw(output: Path) -> None:
        figure, axes = pyplot().subplots(figsize=(7, 2.6), layout="constrained")
        names = [name.split(":")[0] for name in masks]
        axes.barh(names, [found.sampled] * len(masks), color="tab:blue", label="sampled")
        axes.barh(names, list(masks.values()), left=found.sampled, color="tab:red", label="spurious")
        axes.invert_yaxis()
        axes.set_xlabel("positions in the loss")
        axes.legend()
        save(figure, output)

    return Findings({**counted, **asdict(found)}, body, draw)
