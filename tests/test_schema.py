"""Pydantic's errors in one line of ours."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memopd import schema


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    number: Annotated[float, Field(gt=0, le=1)] = 0.5
    whole: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    choice: Literal["a", "b"] = "a"
    flag: bool = False
    texts: Annotated[list[str], Field(min_length=1)] = ["x"]
    parts: "list[Part]" = []


class Needs(BaseModel):
    name: str


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"number": "1"}, 'number: must be a number, got "1"'),
        ({"number": True}, "number: must be a number, got true"),
        ({"number": 10**400}, f"number: {'1' + '0' * 36}... is too large"),
        ({"number": float("nan")}, "number: must be a finite number, got NaN"),
        ({"number": 0}, "number: must be above 0, got 0"),
        ({"number": 1.5}, "number: must be at most 1, got 1.5"),
        ({"whole": 1.0}, "whole: must be a whole number, got 1.0"),
        ({"whole": -1}, "whole: must be 0 or more, got -1"),
        ({"whole": 1 << 31}, "whole: must be below 2147483648, got 2147483648"),
        ({"choice": "c"}, 'choice: "c" is not one of a, b'),
        ({"flag": 1}, "flag: must be true or false, got 1"),
        ({"texts": []}, "texts: must be at least 1 long, got []"),
        ({"texts": ["x", None]}, "texts[1]: must be a string, got null"),
        ({"parts": [{}, {"whole": None}]}, "parts[1].whole: must be a whole number, got null"),
        ({"parts": [3]}, "parts[0]: must be an object, got 3"),
        ({"parts": {"a": 1}}, 'parts: must be a list, got {"a": 1}'),
        ({"flag": list(range(1000))}, "flag: must be true or false, got [0, 1, 2, "),
        ({"other": 1}, "other: unknown field"),
    ],
)
def test_one_line(given, line):
    with pytest.raises(ValidationError) as caught:
        Part.model_validate(given)
    (error,) = caught.value.errors()
    said = f"{schema.place(error['loc'])}: {schema.message(error)}"
    assert said.startswith(line)
    assert len(said) < 90


def test_a_missing_field():
    with pytest.raises(ValidationError) as caught:
        Needs.model_validate({})
    assert schema.message(caught.value.errors()[0]) == "missing"
