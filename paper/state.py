"""Table 3 and the teacher's mismatch: the same sampled actions in a persistent history, run alone, and packed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.output import markdown_table, pyplot, save
from memopd.verify.audit import Audit, audit
from memopd.verify.equivalence import at_precision
from memopd.verify.tables import Cells, arm_cells, mismatch_cells, representation_cells
from paper.page import Findings
from paper.trajectories import Subject, counts, sentence


def findings(subject: Subject) -> Findings:
    import torch

    from memopd.models.load import load_tokenizer

    s = subject.settings
    episodes, tokenizer = subject.episodes(s.rules[0]), load_tokenizer(s.model)
    found = audit(subject.model, episodes, "auto", subject.teacher, s.model, subject.progress, tokenizer)
    rounded = audit(at_precision(subject.model, torch.bfloat16), episodes, "auto", None, s.model, subject.progress)
    counted = counts(episodes)
    numbers: dict[str, Any] = {
        **counted,
        "representations": [asdict(row) for row in found.representations],
        "student": [asdict(row) for row in found.student],
        "teacher": [asdict(row) for row in found.teacher],
        "arms": [asdict(row) for row in found.arms],
        "rounding": [asdict(row) for row in found.rounding],
        "equivalence": found.equivalence.as_dict(),
        "bfloat16": {
            "representations": [asdict(row) for row in rounded.representations],
            "rounding": [asdict(row) for row in rounded.rounding],
            "equivalence": rounded.equivalence.as_dict(),
        },
        "notes": list(found.notes),
        "sampled_with": subject.sampled_with(s.rules[0]),
    }
    body = [
        sentence(s, counted) + " Errors compare the same sampled actions with the calls run alone, unpadded.",
        _markdown(representation_cells(found.representations)),
        "By call, from 0: the student in persistent states, against itself in exact states. Under MEM1's rule nothing "
        "is dropped before call 2, so that calls 0 and 1 cannot differ. KL is KL(exact ‖ persistent).",
        _markdown(mismatch_cells(found.student)),
        f"The teacher, `{s.teacher}`, in the same states:",
        _markdown(mismatch_cells(found.teacher)),
        "What other trainers do with the same calls. *Saves*: rows of a sequence per call ÷ rows. *At best*: the same, "
        "if every common beginning of its sequences ran once. *Lost*: sampled tokens without a gradient.",
        _markdown(arm_cells(found)),
        f"{s.dtype} beside bfloat16. The first lines of each compare two runs of one precision. The others compare "
        "with a higher precision, and show what rounding does by itself, also to the calls alone.",
        markdown_table(["run", "from", *representation_cells([])[0][1:]], _precisions(found) + _precisions(rounded)),
    ]
    return Findings(numbers, body, lambda output: _draw(found, output), found.passed and rounded.passed)


def _markdown(cells: Cells) -> str:
    return markdown_table(cells[0], cells[1:])


def _precisions(report: Audit) -> Cells:
    e = report.equivalence
    floors = [r for r in report.representations if r.representation != "persistent history"]
    parts = [("the calls alone", floors), (f"the calls alone, {e.precise}", report.rounding)]
    return [[f"{e.dtype}: {name}", of, *rest] for of, rows in parts for name, *rest in representation_cells(rows)[1:]]


def _draw(found: Audit, output: Path) -> None:
    figure, (errors, teacher) = pyplot().subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    rows = found.representations
    errors.barh([r.representation for r in rows], [r.p99_logprob for r in rows], color="tab:blue")
    errors.set(xscale="log", xlabel="p99 |Δlog p| against the calls alone", title="student")
    errors.invert_yaxis()
    alone = [t for t in found.teacher if t.calls not in ("call 1 and later", "call 2 and later")]  # not pooled
    teacher.bar([t.calls for t in alone], [100 * (1 - t.top1) for t in alone], color="tab:red")
    for x, t in enumerate(alone):
        teacher.annotate(f"KL {t.mean_kl:.2g}", (x, 100 * (1 - t.top1)), ha="center", va="bottom")
    teacher.set(ylabel="% of first choices that change", title="teacher: persistent against exact states")
    teacher.margins(y=0.15)
    save(figure, output)
