"""MemOPD: training agents that rewrite their own context, in the states they were really in."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memopd.version import __version__

if TYPE_CHECKING:
    from memopd import verify
    from memopd.compile import Packed, compile_calls, fill
    from memopd.score import packed_logprobs, packed_rows
    from memopd.types import Call, Episode, Sampling, Segment, StopReason

# Loaded on first use, so that `memopd --help` and the NumPy-only parts never wait for torch.
_HOME = {
    "Call": "memopd.types",
    "Episode": "memopd.types",
    "Packed": "memopd.compile",
    "Sampling": "memopd.types",
    "Segment": "memopd.types",
    "StopReason": "memopd.types",
    "compile_calls": "memopd.compile",
    "fill": "memopd.compile",
    "packed_logprobs": "memopd.score",
    "packed_rows": "memopd.score",
    "verify": "memopd",
}

__all__ = [
    "Call",
    "Episode",
    "Packed",
    "Sampling",
    "Segment",
    "StopReason",
    "__version__",
    "compile_calls",
    "fill",
    "packed_logprobs",
    "packed_rows",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'memopd' has no attribute {name!r}")
    if name == "verify":
        return import_module("memopd.verify")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
