"""Samples from a model in this process, with continuous batching over one cache."""

from memopd.engine.local.engine import LocalEngine

__all__ = ["LocalEngine"]
