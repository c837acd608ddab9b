"""Pydantic's errors in one line: the place of the value, what it must be, and what was given.

    optimise.lr: must be a number, got "fast"
    segments[0].start: must be a whole number, got null

Configurations, imported calls and requests are all pydantic models, and they all report errors in this form.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Location: TypeAlias = tuple[int | str, ...]

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # error types: a field that the model does not have
MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "string_unicode": "a string of Unicode text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dataclass_type": "an object",
}


def place(location: Location) -> str:
    """
    >>> place(("segments", 0, "start"))
    'segments[0].start'
    """
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return "".join(parts).removeprefix(".")


def message(error: ErrorDetails) -> str:
    """Describe what is wrong with one value, without its place."""
    kind, context = error["type"], error.get("ctx", {})
    given = short(error["input"])
    if kind in MISSING:
        return "missing"
    if kind in UNKNOWN:
        return "unknown field"
    if kind in ("value_error", "assertion_error"):
        return str(context["error"])  # raised by one of our validators
    if kind == "json_invalid":
        return f"not JSON: {context['error']}"
    if kind == "literal_error":
        choices = ", ".join(re.findall(r"'([^']*)'", context["expected"]))
        return f"{given} is not one of {choices}"
    if kind in _KINDS and type(error["input"]) is int and kind == "float_type":
        return f"{given} is too large"  # strict floats accept integers, except those that no float can represent
    return f"must be {_KINDS.get(kind) or _bound(kind, context)}, got {given}"


def short(value: Any) -> str:
    """The value as JSON, cut off, because an error should not print a thousand ids."""
    text = ""
    for part in json.JSONEncoder(default=repr).iterencode(value):
        text += part
        if len(text) > 40:
            return f"{text[:37]}..."
    return text


def _bound(kind: str, context: dict[str, Any]) -> str:
    limit = next((value for value in context.values() if isinstance(value, int | float)), 0)
    limit = int(limit) if limit == int(limit) else limit  # 0, not 0.0
    match kind:
        case "finite_number":
            return "a finite number"
        case "greater_than":
            return f"above {limit}"
        case "greater_than_equal":
            return f"{limit} or more"
        case "less_than":
            return f"below {limit}"
        case "less_than_equal":
            return f"at most {limit}"
        case "too_short":
            return f"at least {context['min_length']} long"
    return f"valid ({kind.replace('_', ' ')})"
