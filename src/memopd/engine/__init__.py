"""Engines sample tokens, from a model in this process or from vLLM servers."""

from memopd.engine.protocol import Completion, Engine, LiveEngine, Request, Ticket
from memopd.engine.session import Session, open_session

__all__ = ["Completion", "Engine", "LiveEngine", "Request", "Session", "Ticket", "open_session"]
