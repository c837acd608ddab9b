"""Import verl's rows with a response_mask, whose zeros are what tools answered: one call for each run of ones.

| file | who writes it |
|---|---|
| tq_batch.pt | `skip.rollout_tq`; the rows {uid}_{session}_{index} of a session are one episode |
| gen_batch.dp | `skip.rollout`, or `DataProto.save_to_disk`: a padded batch, each row an episode |
| *.jsonl | you, with `AgentLoopOutput.model_dump_json`; a "uid" may be added to name the group |

The first two are pickles, and are read without executing them.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from memopd import schema
from memopd.record.importers.calls import Numbers, Tokens, read_lines
from memopd.record.importers.pickles import DAMAGE, Made, array, from_bytes, read_file
from memopd.record.importers.rows import Row, episode, flags, turns, unpadded
from memopd.record.importers.text import refuse_text
from memopd.record.store import StoreError
from memopd.types import Call, Episode

log = logging.getLogger("memopd")

_KEY = re.compile(r"(.+)_([0-9]{1,9})_([0-9]{1,9})")

PACKAGES = ("verl", "tensordict", "torch", "numpy")


class Placed(NamedTuple):
    """A row, where it comes from and where it belongs."""

    place: str
    row: Row
    episode: str
    task: str
    policy_version: int = 0


def import_verl(path: Path) -> Iterator[Episode]:
    """Yield the episodes of one of verl's files. A StoreError names the row and the field."""
    with path.open("rb") as file:
        is_pickle = file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
    try:
        rows = _pickled(path) if is_pickle else _lines(path)
        yield from _episodes(path, rows)
    except StoreError:
        raise
    except DAMAGE as error:
        raise StoreError(f"{path}: {error}") from None


def _episodes(path: Path, rows: Iterator[Placed]) -> Iterator[Episode]:
    skipped, has_rewards = 0, False
    for id, group in groupby(rows, key=lambda placed: placed.episode):
        calls: list[Call] = []
        for placed in group:
            has_rewards |= placed.row.rewards is not None
            try:
                made = turns(placed.row, placed.policy_version)
            except ValueError as error:
                raise StoreError(f"{path}: {placed.place}: {error}") from None
            if made:  # verl copies a session's reward to each of its rows, so that of the last row counts
                calls = [*(replace(call, reward=0.0) for call in calls), *made]
        if calls:
            yield episode(id, placed.task, calls)
        else:
            skipped += 1
    if skipped:
        log.warning("%s: left out %d episodes, whose response_mask is 0 everywhere", path, skipped)
    if not has_rewards:
        log.warning("%s: has no rewards; every reward is 0", path)


class _Output(BaseModel):
    """verl's AgentLoopOutput, the part that we read."""

    model_config = ConfigDict(strict=True, extra="ignore")

    prompt_ids: Tokens
    response_ids: Tokens
    response_mask: Tokens
    response_logprobs: Numbers | None = None
    reward_score: float | None = None
    extra_fields: dict[str, Any] = {}
    uid: str | int | None = None


def _lines(path: Path) -> Iterator[Placed]:
    for number, given in read_lines(path):
        if "response_mask" not in given:
            refuse_text(path, given)
        try:
            line = _Output.model_validate(given)
            rewards = None
            if line.reward_score is not None and len(line.response_ids):
                rewards = np.zeros(len(line.response_ids))
                rewards[-1] = line.reward_score
            row = _row(line.prompt_ids, line.response_ids, line.response_mask, line.response_logprobs, rewards)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise StoreError(f"{path}: line {number}: {schema.place(first['loc'])}: {schema.message(first)}") from None
        except ValueError as error:
            raise StoreError(f"{path}: line {number}: {error}") from None
        id = f"{path.stem}-{number}"
        task = id if line.uid is None else str(line.uid)
        yield Placed(f"line {number}", row, id, task, _version(line.extra_fields.get("min_global_steps")))


def _row(prompt: Any, response: Any, mask: Any, logprobs: Any, rewards: Any) -> Row:
    """A row that is not padded. `logprobs` and `rewards` are those of the response."""
    lengths = {"response_mask": mask, "rollout_log_probs": logprobs, "rm_scores": rewards}
    for name, values in lengths.items():
        if values is not None and len(values) != len(response):
            raise ValueError(f"{name}: {len(values)} values for {len(response)} responses")
    before = np.zeros(len(prompt))
    return Row(
        np.concatenate([prompt, response]),
        np.concatenate([before.astype(bool), flags(mask, "response_mask")]),
        None if logprobs is None else np.concatenate([before, logprobs]),
        None if rewards is None else np.concatenate([before, rewards]),
    )


def _pickled(path: Path) -> Iterator[Placed]:
    value = read_file(path.read_bytes(), PACKAGES)
    if isinstance(value, dict) and {"tensordict", "keys"} <= value.keys():
        return _sessions(_fields(value["tensordict"]), value["keys"])
    if isinstance(value, Made) and value.of.name == "DataProto" and isinstance(value.state, tuple):
        batch, other, _ = value.state
        return _padded(path, _fields(read_file(batch, PACKAGES) if isinstance(batch, bytes) else batch), other)
    raise ValueError("not a DataProto or a batch of the TransferQueue of verl")


def _padded(path: Path, fields: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Placed]:
    """The rows of a DataProto. Prompts are padded on the left and responses on the right."""
    names = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs", "rm_scores")
    columns = [_column(fields, name, required=i < 3) for i, name in enumerate(names)]
    uids = array(other["uid"]).tolist() if "uid" in other else None
    versions = array(other["min_global_steps"]).tolist() if "min_global_steps" in other else None
    seen: Counter[str] = Counter()
    for i in range(len(columns[0])):
        try:
            given: list[Any] = [None if column is None else column[i] for column in columns]
            row = unpadded("response_mask", *given)
            task = id = f"{path.parent.name}-{path.stem}-{i}"
            if uids is not None:
                if type(uids[i]) not in (str, int):
                    raise ValueError(f"uid: must be text, got {type(uids[i]).__name__}")
                task = str(uids[i])
                id = f"{task}-{seen[task]}"
                seen[task] += 1
        except DAMAGE as error:
            raise StoreError(f"{path}: row {i}: {error}") from None
        yield Placed(f"row {i}", row, id, task, _version(versions[i] if versions else None))


def _sessions(fields: Mapping[str, Any], keys: Sequence[str]) -> Iterator[Placed]:
    """The rows of a batch of the TransferQueue, with those of a session together and in order."""
    names = ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
    columns = [_column(fields, name, required=i < 3) for i, name in enumerate(names)]
    extra = _column(fields, "extra_fields", required=False)
    places = []
    for i, key in enumerate(keys):
        if not (isinstance(key, str) and (parts := _KEY.fullmatch(key))):
            raise ValueError(f"row {i}: keys: must be uid_session_index, got {schema.short(key)}")
        places.append((parts[1], int(parts[2]), int(parts[3]), i))
    for name, column in zip(names, columns, strict=True):
        if column is not None and len(column) != len(keys):
            raise ValueError(f"{name}: {len(column)} rows for {len(keys)} keys")
    for uid, session, index, i in sorted(places):
        try:
            row = _row(*(None if column is None else column[i] for column in columns))
        except DAMAGE as error:
            raise ValueError(f"row {i}: {error}") from None
        version = _version(extra[i].get("min_global_steps") if extra and isinstance(extra[i], dict) else None)
        yield Placed(f"row {i} ({uid}_{session}_{index})", row, f"{uid}_{session}", uid, version)


def _fields(tensordict: Any) -> dict[str, Any]:
    """The fields of a recorded TensorDict: all in one storage (consolidated), a tensor for each, or verl's own way."""
    if isinstance(tensordict, tuple):  # VERL_DATAPROTO_SERIALIZATION_METHOD=numpy
        items = tensordict[2].items()
        return {
            name: from_bytes(array(data).tobytes(), dtype, shape.arguments[0]) for name, (dtype, shape, data) in items
        }
    if isinstance(tensordict, Made) and tensordict.of.name == "_rebuild_tensordict_files_consolidated":
        metadata, storage = tensordict.arguments
        data = array(storage).tobytes()
        return {
            name: from_bytes(data[start : stop - (padding or 0)], dtype, shape)
            for name, (dtype, shape, start, stop, padding) in metadata["leaves"].items()
        }
    if isinstance(tensordict, Made) and tensordict.of.name == "_make_td":
        return dict(tensordict.arguments[1]["_tensordict"])
    raise ValueError("a TensorDict of an unknown form")


def _column(fields: Mapping[str, Any], name: str, required: bool) -> Any:
    """A field, row by row: a matrix, the rows of a nested tensor, or a list of Python values."""
    value = fields.get(name)
    if value is None:
        if required:
            raise ValueError(f"{name}: missing; rows need prompts, responses and a response_mask")
        return None
    try:
        if isinstance(value, Made) and value.of.name == "NonTensorStack":
            return [item.state["non_tensordict"]["data"] for item in value.state["tensordicts"]]
        if isinstance(value, Made) and _is_nested(value):
            return _nested(value.arguments[2][0])
        column = value if isinstance(value, np.ndarray) else array(value)
    except DAMAGE as error:
        raise ValueError(f"{name}: {error}") from None
    if column.ndim != 2:
        raise ValueError(f"{name}: must be a matrix, has shape {column.shape}")
    return column


def _is_nested(value: Made) -> bool:
    return value.of.name == "_rebuild_from_type_v2" and getattr(value.arguments[0], "name", "") == "_rebuild_njt"


def _nested(parts: Mapping[str, Any]) -> list[NDArray[Any]]:
    values, offsets = array(parts["values"]), array(parts["offsets"])
    if parts.get("lengths") is not None or parts.get("_ragged_idx") != 1:
        raise ValueError("a nested tensor with holes, or with more than one dimension")
    if len(offsets) and (offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] != len(values)):
        raise ValueError("a nested tensor whose offsets do not fit its values")
    return np.split(values, offsets[1:-1])


def _version(step: Any) -> int:
    """The oldest weights that sampled a row."""
    return step if type(step) is int and step >= 0 else 0
