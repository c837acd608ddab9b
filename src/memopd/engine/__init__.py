"""Engines sample tokens, from a model in this process or from vLLM servers."""

from memopd.engine.protocol import Completion, Engine, LiveEngine, Request, Ticket

__all__ = ["Completion", "Engine", "LiveEngine", "Request", "Ticket"]
