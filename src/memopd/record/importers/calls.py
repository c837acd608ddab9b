"""Import JSON lines, one call each.

    {"episode": "e0", "prompt": [5, 6, 7], "completion": [8, 9], "logprobs": [-0.1, -2.3]}
    {"episode": "e0", "prompt": [5, 8, 9, 3], "completion": [2], "episode_reward": 1}

The fields of a line are the store's columns, under their own names or under those that vLLM and other trainers use.
Only `episode`, `prompt` and `completion` are required. An unknown field is an error that names the line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
)

from memopd import schema
from memopd.files import json_lines
from memopd.record.importers.text import refuse_text
from memopd.record.store import SCHEMA, Row, StoreError, assemble
from memopd.types import Episode

ALIASES = {
    "prompt": ("prompt_token_ids", "prompt_ids"),
    "completion": ("token_ids", "completion_ids", "completion_token_ids", "response_ids"),
    "logprobs": ("log_probs", "response_logprobs"),
    "stop": ("finish_reason",),
}
REQUIRED = ("episode", "prompt", "completion")
_STOPS = {
    "stop": "stop",
    "tool_calls": "stop",  # chat servers report this when the model stopped by itself to call a tool
    "function_call": "stop",
    "length": "length",
    "aborted": "aborted",
    "abort": "aborted",  # vLLM's name for it
}


def import_calls(path: str | Path) -> Iterator[Episode]:
    """Yield the episodes of a .jsonl or .jsonl.gz file. A StoreError names the file and the line."""
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"{path}: no such file")
    return assemble(path, _rows(path))


def _array(types: set[type], kind: str, dtype: type[Any]) -> PlainValidator:
    """Validate a flat list of numbers with NumPy, because pydantic would visit each id of a long prompt by itself."""

    def array(values: Any) -> Any:
        if type(values) is not list:
            raise ValueError(f"must be a list, got {schema.short(values)}")
        if not set(map(type, values)) <= types:  # isinstance would accept true as an integer
            index, wrong = next((i, v) for i, v in enumerate(values) if type(v) not in types)
            raise ValueError(f"must be a list of {kind}, got {schema.short(wrong)} at {index}")
        try:
            return np.array(values, dtype)
        except OverflowError:
            raise ValueError(f"{schema.short(max(values, key=abs))} is too large") from None

    return PlainValidator(array)


def _stop(value: Any) -> Any:
    if isinstance(value, str) and value not in _STOPS:
        raise ValueError(f"must be one of {', '.join(_STOPS)}, got {value!r}")
    return _STOPS[value] if isinstance(value, str) else value


# Types of fields, for the models of other formats too. Ids and log-probabilities become arrays.
Tokens = Annotated[Any, _array({int}, "whole numbers", np.int64)]
Numbers = Annotated[Any, _array({int, float}, "numbers", np.float64)]
Finish = Annotated[str, BeforeValidator(_stop)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class SegmentFields(_Fields):
    kind: str
    start: int
    stop: int
    source: int | None = None


# The store's schema declares the names and types of the fields and whether they may be null. This adds what JSON needs.
_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("episode", "task"), Annotated[str, BeforeValidator(lambda v: str(v) if type(v) is int else v)]),
    "prompt": Tokens,
    "completion": Tokens,
    "logprobs": Numbers,
    "stop": Finish,
    "segments": Annotated[list[SegmentFields], FailFast()],
}
_BY_TYPE = {pa.string(): str, pa.int32(): int, pa.int64(): int, pa.float64(): float, pa.bool_(): bool}


def _field(column: Any) -> tuple[Any, Any]:
    kind = _BY_NAME.get(column.name) or _BY_TYPE[column.type]
    names = AliasChoices(column.name, *ALIASES.get(column.name, ()))
    default = ... if column.name in REQUIRED else None  # an omitted field gets the default of Call, Episode or Sampling
    return kind | None if column.nullable else kind, Field(default, validation_alias=names)


_COLUMNS: dict[str, Any] = {column.name: _field(column) for column in SCHEMA}
CallFields = create_model("CallFields", __base__=_Fields, **_COLUMNS)


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    previous, t = None, 0
    for number, given in read_lines(path):
        where = f"{path}: line {number}"
        if type(given.get("episode")) not in (str, int):
            refuse_text(path, given)
            raise StoreError(f"{where}: must be a JSON object with an episode, a string or a whole number")
        id = str(given["episode"])
        previous, t = id, t + 1 if id == previous else 0
        try:
            line = CallFields.model_validate(given)
        except ValidationError as error:
            raise StoreError(f"{where}: episode {id!r}: call {t}: {_message(error, given)}") from None
        row = {name: value for name in line.model_fields_set if (value := getattr(line, name)) is not None}
        if "segments" in row:
            row["segments"] = [segment.model_dump() for segment in row["segments"]]
        yield f"line {number}", sampling_fields(row)


def sampling_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Sampling` where servers say it otherwise: temperature 0 is the likeliest token, as the gateway
    records it, and a top-k of -1 is the whole vocabulary."""
    if given.get("temperature") == 0:
        return {name: value for name, value in given.items() if name not in ("temperature", "top_p")} | {"top_k": 1}
    return given | {"top_k": 0} if given.get("top_k") == -1 else given


def read_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """The objects of a file of JSON lines, each with the number of its line. A StoreError names file and line."""
    try:
        yield from json_lines(path)
    except ValueError as error:
        raise StoreError(str(error)) from None


def _message(error: ValidationError, given: Row) -> str:
    """Describe the first of pydantic's errors: the field, under the store's name for it, and the problem."""
    first = error.errors(include_url=False)[0]
    where = first["loc"]
    name = next((name for name, others in ALIASES.items() if where[0] in others), str(where[0]))
    if first["type"] in schema.UNKNOWN:
        if name in CallFields.model_fields and len(where) == 1:
            used = next(n for n in (name, *ALIASES[name]) if n in given)
            return f"{name}: given twice, as {used} and as {where[0]}"
        model = CallFields if len(where) == 1 else SegmentFields
        others = sum(ALIASES.values(), ()) if len(where) == 1 else ()
        return f"{schema.place(where)}: unknown field; known are {', '.join((*model.model_fields, *others))}"
    return f"{schema.place((name, *where[1:]))}: {schema.message(first)}"
