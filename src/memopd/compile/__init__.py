"""Turns calls into packed rows: the trie, packs, budgets, and the flattened controls."""

from memopd.compile.controls import (
    corrupt,
    fork,
    mem1_official,
    persistent_history,
    realign,
    response_mask,
    trajectory_mask,
)
from memopd.compile.pack import Decisions, Packed, compile_calls, fill, side_by_side, unshared

__all__ = [
    "Decisions",
    "Packed",
    "compile_calls",
    "corrupt",
    "fill",
    "fork",
    "mem1_official",
    "persistent_history",
    "realign",
    "response_mask",
    "side_by_side",
    "trajectory_mask",
    "unshared",
]
