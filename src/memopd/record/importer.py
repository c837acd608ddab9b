"""Calls recorded by other programs: JSON lines, one call a line, to episodes.

    {"episode": "e0", "prompt": [5, 6, 7], "completion": [8, 9], "logprobs": [-0.1, -2.3]}
    {"episode": "e0", "prompt": [5, 8, 9, 3], "completion": [2], "episode_reward": 1}

A line has the store's columns, of which only `episode`, `prompt` and `completion` must be there, or the names that
vLLM and trainers emit for them. Nothing is guessed: what is not understood is an error that names the line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from memopd.record.store import Row, StoreError, assemble
from memopd.types import Episode

_ALIASES = {
    "prompt_token_ids": "prompt",
    "prompt_ids": "prompt",
    "token_ids": "completion",
    "completion_ids": "completion",
    "completion_token_ids": "completion",
    "response_ids": "completion",
    "log_probs": "logprobs",
    "response_logprobs": "logprobs",
    "finish_reason": "stop",
}
_STOPS = {
    "stop": "stop",
    "tool_calls": "stop",  # of chat servers: the model stopped by itself
    "function_call": "stop",
    "length": "length",
    "aborted": "aborted",
    "abort": "aborted",  # vLLM's word
}

# The exact types of a JSON value that each field takes: to isinstance, true would be an integer.
_NULL = type(None)
_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    _NULL: "null",
}
_FIELDS: dict[str, tuple[type, ...]] = {
    "episode": (str, int),
    "task": (str, int),
    "call": (int,),
    "prompt": (list,),
    "completion": (list,),
    "logprobs": (list, _NULL),
    "stop": (str, _NULL),
    "reward": (float, int),
    "trainable": (bool,),
    "purpose": (str,),
    "policy_version": (int,),
    "segments": (list,),
    "episode_reward": (float, int),
    "temperature": (float, int),
    "top_p": (float, int),
    "top_k": (int,),
    "max_tokens": (int, _NULL),
    "seed": (int, _NULL),
    "started": (float, int, _NULL),
    "ended": (float, int, _NULL),
    "memory": (str,),
}
_ARRAYS: list[tuple[str, tuple[type, ...], type[Any]]] = [
    ("prompt", (int,), np.int64),
    ("completion", (int,), np.int64),
    ("logprobs", (float, int), np.float64),
]
_SEGMENT: dict[str, tuple[type, ...]] = {"kind": (str,), "start": (int,), "stop": (int,), "source": (int, _NULL)}


def import_calls(path: str | Path) -> Iterator[Episode]:
    """The episodes of a .jsonl or .jsonl.gz file, one at a time; a StoreError names file and line."""
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"{path}: no such file")
    return assemble(path, _rows(path))


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    before, t = None, 0
    for number, line in _lines(path):
        where = f"{path}: line {number}"
        try:
            given = json.loads(line, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where}: not a line of JSON: {error}") from None
        if not isinstance(given, dict) or type(given.get("episode")) not in _FIELDS["episode"]:
            raise StoreError(f"{where}: must be a JSON object with an episode, a string or an integer")
        id = str(given["episode"])
        before, t = id, t + 1 if id == before else 0
        try:
            row = _row(given)
        except ValueError as error:
            raise StoreError(f"{where}: episode {id!r}: call {t}: {error}") from None
        yield f"line {number}", row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Every line that is not blank, with its number from 1."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: line {number + 1}: cannot be read: {error}") from None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _unique(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice")
    return row


def _row(given: Row) -> Row:
    """The line under the store's names, its values of the types that the store's rows have."""
    names: dict[str, str] = {}
    for name in given:
        field = _ALIASES.get(name, name)
        if field not in _FIELDS:
            raise ValueError(f"{name}: unknown field; known are {', '.join((*_FIELDS, *_ALIASES))}")
        if field in names:
            raise ValueError(f"{field}: given twice, as {names[field]} and as {name}")
        names[field] = name
    row = {field: _checked(field, given[name], _FIELDS[field]) for field, name in names.items()}
    row = {field: value for field, value in row.items() if value is not None}  # null says nothing
    for field, types, dtype in _ARRAYS:
        if field in row:
            row[field] = _array(field, row[field], types, dtype)
        elif field != "logprobs":
            raise ValueError(f"{field}: missing")
    for field in {"episode", "task"} & row.keys():
        row[field] = str(row[field])
    if "stop" in row:
        if row["stop"] not in _STOPS:
            raise ValueError(f"stop: must be one of {', '.join(_STOPS)}, got {row['stop']!r}")
        row["stop"] = _STOPS[row["stop"]]
    if "segments" in row:
        row["segments"] = [_segment(f"segments[{i}]", segment) for i, segment in enumerate(row["segments"])]
    return row


def _array(field: str, values: list[Any], types: tuple[type, ...], dtype: type[Any]) -> Any:
    if not set(map(type, values)) <= set(types):  # in C, unlike the search for the culprit
        values = [_checked(f"{field}[{i}]", value, types) for i, value in enumerate(values)]
    try:
        return np.array(values, dtype)
    except OverflowError:
        raise ValueError(f"{field}: {_short(max(values, key=abs))} is too large") from None


def _segment(name: str, segment: Any) -> Row:
    if type(segment) is not dict or not segment.keys() <= _SEGMENT.keys():
        raise ValueError(f"{name}: must be an object with {', '.join(_SEGMENT)}, got {_short(segment)}")
    return {field: _checked(f"{name}.{field}", segment.get(field), types) for field, types in _SEGMENT.items()}


def _checked(name: str, value: Any, types: tuple[type, ...]) -> Any:
    if type(value) not in types:
        kinds = [_NAMES[t] for t in types if not (t is int and float in types)]
        raise ValueError(f"{name}: must be {' or '.join(kinds)}, got {_short(value)}")
    try:
        return float(value) if type(value) is int and float in types else value
    except OverflowError:
        raise ValueError(f"{name}: {_short(value)} is too large") from None


def _short(value: Any) -> str:
    """The value as JSON, cut: nobody reads a thousand ids in an error."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
