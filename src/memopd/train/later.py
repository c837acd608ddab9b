"""Tensors that are computed when they are first read, or never, if somebody finds them on the way before.

π_old of the mini-batch that is updated first is what the update's own forward pass computes. A scoring pass before it
would compute the same numbers, so π_old is a `Later` there: the update sets it, and an algorithm whose `credit` reads
it before the update gets a scoring pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor


class Later:
    """A tensor that is not known yet. All who hold this object see it as soon as one of them computes or sets it."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute
        self.value: Tensor | None = None

    def read(self) -> Tensor:
        if self.value is None:
            self.value = self.compute()
        return self.value


T = TypeVar("T", bound=type)


def maybe_later(*fields: str) -> Callable[[T], T]:
    """For a dataclass without slots: these fields may be given as a `Later`, and are always read as a tensor."""

    def decorated(owner: T) -> T:
        for name in fields:
            setattr(owner, name, _Field(name))
        return owner

    return decorated


class _Field:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        content = instance.__dict__[self.name]
        return content.read() if isinstance(content, Later) else content

    def __set__(self, instance: object, content: Any) -> None:
        instance.__dict__[self.name] = content


def held(instance: object, field: str) -> Any:
    """A tensor or a `Later`, as it was given."""
    return instance.__dict__[field]


def unknown(instance: object, field: str) -> Later | None:
    """The `Later` in a field if nobody has computed it yet."""
    content = held(instance, field)
    return content if isinstance(content, Later) and content.value is None else None
