"""Refuse dumps of text. Text that is encoded again need not give the ids that were sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memopd.record.store import StoreError

_VERL = (
    "verl's trainer.rollout_data_dir writes text only: set skip.rollout_tq.enable=True and skip.rollout_tq.steps (with "
    "the older trainer, skip.rollout.*) and a new dump_dir, and import each step's tq_batch.pt or gen_batch.dp"
)
_TRL = (
    "TRL's log_completions writes text only: write the prompt_ids, completion_ids and logprobs that your rollout_func "
    'returns as JSON lines with an "episode", or sample through `memopd gateway`'
)
_ANY = (
    'record the ids of every prompt and completion (vLLM returns them with "return_token_ids": true) as JSON lines '
    'with an "episode", or let the agent call `memopd gateway`'
)


def refuse_text(path: Path, row: dict[str, Any]) -> None:
    """Raise an error that says what to record instead, if no field of the row holds token ids."""
    if any(isinstance(value, list) and value and type(value[0]) is int for value in row.values()):
        return
    if {"input", "output", "score"} <= row.keys():
        advice = _VERL
    elif {"prompt", "completion", "advantage"} <= row.keys():
        advice = _TRL
    else:
        advice = _ANY
    raise StoreError(f"{path}: has text but no token ids, and encoding it again need not give those sampled; {advice}")
