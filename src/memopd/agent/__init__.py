"""The agent: the MEM1 protocol, memory rules, environments, and the `Agent` that plays tasks with them."""

from memopd.agent.agent import Agent, repeat
from memopd.agent.codec import Codec
from memopd.agent.environment import Environment, Observation, Outcome, Progress, SearchEnvironment
from memopd.agent.memory import Ask, Memory, Piece, Reply, Turn

__all__ = [
    "Agent",
    "Ask",
    "Codec",
    "Environment",
    "Memory",
    "Observation",
    "Outcome",
    "Piece",
    "Progress",
    "Reply",
    "SearchEnvironment",
    "Turn",
    "repeat",
]
