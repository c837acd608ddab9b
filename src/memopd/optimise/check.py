"""Is what is about to be trained on equivalent to independent calls? The report is kept; a failure stops the run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from memopd.compile import Packed
from memopd.files import whole
from memopd.optimise import ranks
from memopd.optimise.batch import MiniBatch
from memopd.optimise.learner import Learner
from memopd.optimise.models import copy_weights, is_sharded, whole_copy
from memopd.types import Call
from memopd.verify import equivalence


def check_equivalence(learner: Learner, batch: MiniBatch, path: Path, step: int) -> None:
    """The first pack of the batch, as it will be trained on, against its calls alone."""
    model = learner.student.model
    if is_sharded(learner.student):
        model = whole_copy(learner.student, learner.config.model.dtype)
        copy_weights(learner.student, model)
    packed, calls = alone(batch)
    report = equivalence(model, calls, learner.config.model.attention, [packed])
    kept = path / "equivalence" / f"step-{step:06d}.json"
    if ranks.rank() == 0:
        with whole(kept) as file:
            file.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    if not math.isfinite(report.error):
        raise ValueError(f"step {step}: the policy's logits are not numbers: its weights are broken; see {kept}")
    if not report.passed:
        raise ValueError(
            f"step {step}: packed and independent calls differ (error {report.error:.2e}, tolerance "
            f"{report.tolerance:.2e}): see {kept}; nothing was updated"
        )


def alone(batch: MiniBatch) -> tuple[Packed, list[Call]]:
    """The first pack with the calls that it holds, numbered from 0."""
    work = batch.work[0]
    held, number = np.unique(batch.call[work.place], return_inverse=True)
    decisions = replace(work.packed.decisions, call=number.astype(np.int32))
    return replace(work.packed, decisions=decisions), [batch.calls[i] for i in held]
