"""Attention kernels for packs: one plan per pack, computed by dense, flex, cascade, or a class of your own."""

from memopd.attention.plan import KERNELS, check_attention, log_once, make_plan

__all__ = ["KERNELS", "check_attention", "log_once", "make_plan"]
