"""How tokens are sampled: a model in this process, or vLLM servers."""

from memopd.engine.protocol import Completion, Engine, LiveEngine, Request, Ticket

__all__ = ["Completion", "Engine", "LiveEngine", "Request", "Ticket"]
