"""Import the batches that SkyRL pickles: `trainer.dump_data_batch`, or `TrainingInputBatch.save`. Nothing is executed.

A batch holds padded rows: sequences, attention_mask, and, for the last ids of each row, loss_mask, rollout_logprobs and
rewards. A row is a trajectory, or a step of one: then metadata["is_last_step"] tells where the next trajectory begins.

SkyRL 0.3 removes the rewards, uids and is_last_step before it dumps a batch. What is gone is not guessed: rewards
are 0, and each row is an episode of its own. Call `save` on the result of `convert_to_training_input` to keep them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memopd.record.importers.pickles import DAMAGE, Made, array, from_bytes, read_file
from memopd.record.importers.rows import episode, turns, unpadded
from memopd.record.store import StoreError
from memopd.types import Call, Episode

log = logging.getLogger("memopd")

PACKAGES = ("skyrl", "skyrl_train", "torch", "numpy")


def import_skyrl(path: Path) -> Iterator[Episode]:
    """Yield the episodes of a pickled batch. A StoreError names the row and the field."""
    try:
        state = _state(read_file(path.read_bytes(), PACKAGES))
        yield from _episodes(path, state["batch_dict"], state["metadata"] or {})
    except StoreError:
        raise
    except DAMAGE as error:
        raise StoreError(f"{path}: {error}") from None


def _state(value: Any) -> dict[str, Any]:
    """What the batch pickled: the arguments of SkyRL's rebuild function, or the state of the older class."""
    state = value.arguments[-1] if isinstance(value, Made) and value.arguments else getattr(value, "state", None)
    if not (isinstance(value, Made) and isinstance(state, dict) and isinstance(state.get("batch_dict"), dict)):
        raise ValueError("not a batch of SkyRL")
    return state


def _episodes(path: Path, batch: dict[str, Any], metadata: dict[str, Any]) -> Iterator[Episode]:
    columns = {name: _column(batch, name) for name in ("sequences", "attention_mask", "loss_mask")}
    logprobs, rewards = (_column(batch, name, required=False) for name in ("rollout_logprobs", "rewards"))
    padded = len(columns["sequences"])
    for name, column in (*columns.items(), ("rollout_logprobs", logprobs), ("rewards", rewards)):
        if column is not None and (column.ndim != 2 or len(column) != padded):
            raise ValueError(f"{name}: must have {padded} rows, has shape {column.shape}")
    rows = padded - int(metadata.get("pad_size", 0))  # the last rows only fill the batch
    tasks, is_last = _tasks(path, metadata, rows), _is_last(metadata, rows)
    if rewards is None:
        log.warning("%s: has no rewards, because SkyRL removes them before it dumps; every reward is 0", path)
    calls: list[Call] = []
    first, skipped, more = 0, 0, 0.0
    for i in range(rows):
        try:
            ids, attention, mask = (column[i] for column in columns.values())
            row = unpadded(
                "loss_mask",
                ids,
                attention,
                mask,
                None if logprobs is None else logprobs[i],
                None if rewards is None else rewards[i],
            )
            made = turns(row)
            if tasks[i] != tasks[first]:
                raise ValueError("uids: changes within a trajectory")
        except ValueError as error:
            raise StoreError(f"{path}: row {i}: {error}") from None
        calls += made
        if not made:  # its tokens were filtered out, but its reward was earned
            skipped += 1
            more += 0.0 if row.rewards is None else float(row.rewards.sum())
        if is_last[i]:
            if calls:
                yield episode(f"{path.stem}-{first}", tasks[first] or f"{path.stem}-{first}", calls, more)
            calls, first, more = [], i + 1, 0.0
    if skipped:
        log.warning("%s: left out %d of %d rows, whose loss_mask is 0 everywhere", path, skipped, rows)


def _column(batch: dict[str, Any], name: str, required: bool = True) -> Any:
    given = batch.get(name)
    if given is None:
        if required:
            raise ValueError(f"{name}: missing; a batch needs sequences, attention_mask and loss_mask")
        return None
    try:
        if given.get("format") == "torch":
            return array(read_file(given["data"], ("torch",)))
        return from_bytes(given["data"], given["dtype"], given["shape"])
    except DAMAGE as error:
        raise ValueError(f"{name}: {error}") from None


def _tasks(path: Path, metadata: dict[str, Any], rows: int) -> list[str]:
    """The prompt of each row: its uid, or else the number of its prompt in the batch, or else nothing."""
    if (uids := _values(metadata, "uids", rows)) is not None:
        if wrong := [uid for uid in uids if type(uid) not in (str, int)]:
            raise ValueError(f"uids: must be text, got {type(wrong[0]).__name__}")
        return [str(uid) for uid in uids]
    tasks = [""] * rows
    for number, (start, stop) in enumerate(metadata.get("policy_prompt_boundaries") or ()):
        for i in range(max(start, 0), min(stop, rows)):
            tasks[i] = f"{path.stem}-prompt-{number}"
    return tasks


def _is_last(metadata: dict[str, Any], rows: int) -> list[bool]:
    is_last = _values(metadata, "is_last_step", rows)
    if is_last is None:
        return [True] * rows
    if rows and not is_last[-1]:
        raise ValueError(f"is_last_step: row {rows - 1} is the last and does not end its trajectory")
    return [bool(last) for last in is_last]


def _values(metadata: dict[str, Any], name: str, rows: int) -> list[Any] | None:
    """One value for each row; those of rows that only fill the batch may follow."""
    given = metadata.get(name)
    if given is None:
        return None
    if not isinstance(given, list) or len(given) < rows:
        raise ValueError(f"{name}: must be a list of {rows} values or more")
    return given[:rows]


def is_batch(name: str) -> bool:
    """Whether a pickle is SkyRL's, by the first name in it."""
    return name.partition(".")[0] in ("skyrl", "skyrl_train")
