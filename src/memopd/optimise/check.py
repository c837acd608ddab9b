"""Is what is about to be trained on equivalent to independent calls? The report is kept; a failure stops the run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from memopd.files import whole
from memopd.optimise import ranks
from memopd.optimise.batch import MiniBatch
from memopd.optimise.learner import Learner
from memopd.optimise.models import full_state, whole_model
from memopd.verify import equivalence

CHECKED_CALLS = 64  # of a batch


def check_equivalence(learner: Learner, batches: list[MiniBatch], path: Path, step: int) -> None:
    """Packed against independent, on the batch at hand; the report is kept, a failure stops the run."""
    model = whole_model(learner.student, learner.config.model.dtype)
    if model is not learner.student.model:
        model.load_state_dict(full_state(learner.student))
    calls = batches[0].calls[:CHECKED_CALLS]
    report = equivalence(model, calls, learner.config.model.attention, budget=learner.config.optimise.budget)
    if ranks.rank() == 0:
        with whole(path / "equivalence" / f"step-{step:06d}.json") as file:
            file.write_text(json.dumps(asdict(report), indent=2, default=str) + "\n")
    if not report.passed:
        raise ValueError(
            f"step {step}: packed and independent calls differ (error {report.error:.2e}, tolerance "
            f"{report.tolerance:.2e}): see {path / 'equivalence'}; nothing was updated"
        )
