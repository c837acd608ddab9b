"""Table 3 and the teacher's mismatch: the same sampled actions in a persistent history, run alone, and packed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table, pyplot, save
from memopd.verify.audit import Audit, audit
from paper.page import Findings
from paper.trajectories import Subject, counts, sentence


def findings(subject: Subject) -> Findings:
    s = subject.settings
    episodes = subject.episodes(s.rules[0])
    found = audit(subject.model, episodes, teacher=subject.teacher, name=s.model, progress=subject.progress)
    counted = counts(episodes)
    numbers: dict[str, Any] = {
        **counted,
        "representations": [asdict(row) for row in found.representations],
        "teacher": [asdict(row) for row in found.teacher],
        "equivalence": found.equivalence.as_dict(),
        "notes": list(found.notes),
    }
    rows = [
        [r.representation, f"{r.p99_logprob:.3g}", f"{100 * r.top1:.2f}", f"{r.top1_changed:,}",
         f"{100 * r.false_clip:.2f}"]
        for r in found.representations
    ]  # fmt: skip
    teacher = [
        [t.calls, f"{t.decisions:,}", f"{100 * t.top1:.2f}", f"{t.top1_changed:,}", f"{t.p99_logprob:.3g}",
         f"{t.mean_kl:.3g}"]
        for t in found.teacher
    ]  # fmt: skip
    body = [
        sentence(s, counted) + " Errors compare the same sampled actions with the calls run alone, unpadded.",
        markdown_table(["representation", "p99 |Δlog p| ↓", "top-1 % ↑", "changed", "false clip % ↓"], rows),
        f"The teacher, `{s.teacher}`, in exact against persistent states:",
        markdown_table(
            ["calls", "actions", "top-1 % ↑", "changed", "p99 |Δlog p| ↓", "mean KL(exact ‖ persistent) ↓"], teacher
        ),
    ]
    return Findings(numbers, body, lambda output: _draw(found, output), found.passed)


def _draw(found: Audit, output: Path) -> None:
    figure, (errors, teacher) = pyplot().subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    rows = found.representations
    errors.barh([r.representation for r in rows], [r.p99_logprob for r in rows], color="tab:blue")
    errors.set(xscale="log", xlabel="p99 |Δlog p| against the calls alone", title="student")
    errors.invert_yaxis()
    when = [t.calls for t in found.teacher]
    teacher.bar(when, [100 * (1 - t.top1) for t in found.teacher], color="tab:red")
    for x, t in enumerate(found.teacher):
        teacher.annotate(f"KL {t.mean_kl:.2g}", (x, 100 * (1 - t.top1)), ha="center", va="bottom")
    teacher.set(ylabel="% of first choices that change", title="teacher: persistent against exact states")
    teacher.margins(y=0.15)
    save(figure, output)
