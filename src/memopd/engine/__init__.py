"""How tokens are sampled: a model in this process, or vLLM servers."""

from memopd.engine.protocol import Completion, Engine, Request

__all__ = ["Completion", "Engine", "Request"]
