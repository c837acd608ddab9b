"""Work in numbers that are the same on every machine, however busy it is."""

import sys
from collections.abc import Callable
from typing import Any


def function_calls(work: Callable[[], Any]) -> int:
    """How many functions `work` calls, those of C among them."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
