"""Work in numbers that are the same on every machine, however busy it is."""

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


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


def module_walks(monkeypatch: Any) -> list[str]:
    """A list that grows by the class of a model whenever its modules are gone through."""
    walks: list[str] = []
    modules = nn.Module.modules
    monkeypatch.setattr(nn.Module, "modules", lambda model: (walks.append(type(model).__name__), modules(model))[1])
    return walks
