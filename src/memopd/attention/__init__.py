"""Visibility to kernels: one plan per pack, served by dense, flex or cascade."""

from memopd.attention.plan import KERNELS, Plan, make_plan, own_attention, planned_attention, say_once
from memopd.attention.support import Sharing, check_length, reference_attention, sharing

__all__ = [
    "KERNELS",
    "Plan",
    "Sharing",
    "check_length",
    "make_plan",
    "own_attention",
    "planned_attention",
    "reference_attention",
    "say_once",
    "sharing",
]
