"""Samples from policies on vLLM servers."""

from memopd.engine.vllm.engine import VllmEngine, rounding_tolerance

__all__ = ["VllmEngine", "rounding_tolerance"]
