"""Visibility to kernels: one plan per pack, served by dense, flex or cascade, or by a class of your own."""

from memopd.attention.plan import KERNELS, check_attention, log_once, make_plan

__all__ = ["KERNELS", "check_attention", "log_once", "make_plan"]
