"""A model in this process: continuous batching over one cache."""

from memopd.engine.local.engine import LocalEngine

__all__ = ["LocalEngine"]
