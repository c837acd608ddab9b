"""Turns calls into packed rows: the trie, packs, budgets, and the flattened controls."""

from memopd.compile.controls import corrupt, persistent_history, response_mask, trajectory_mask
from memopd.compile.pack import Decisions, Packed, compile_calls, fill, side_by_side, unshared

__all__ = [
    "Decisions",
    "Packed",
    "compile_calls",
    "corrupt",
    "fill",
    "persistent_history",
    "response_mask",
    "side_by_side",
    "trajectory_mask",
    "unshared",
]
