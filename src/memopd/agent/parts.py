"""Builds an agent's parts from their names in the configuration: `[tasks]` environment, memory, reward and index.

`check_parts` resolves every name and reports a mistake in one line. It opens nothing, so that it can run before any
model is loaded or any server is contacted. `build_parts` builds the environment and the memory rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memopd.agent.codec import codec_of
from memopd.agent.environment import Environment, SearchEnvironment
from memopd.agent.memory import Memory, named_rule
from memopd.agent.protocol import read_prompt
from memopd.config import TasksConfig
from memopd.names import build, check_parameters, parameters, resolve
from memopd.retrieval import Index, open_index
from memopd.tasks.grading import reward_of

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"search": SearchEnvironment}

# The parameters that the constructor of each kind of part may have.
OFFERED = {
    "environment": ("index", "topk", "reward", "grading", "turns", "prompt", "tokenizer"),
    "memory": ("codec", "tokenizer", "index"),
}


@dataclass(frozen=True, slots=True)
class _Part:
    kind: str  # "environment" or "memory"
    setting: str  # its name in error messages
    name: str
    make: Callable[..., Any]
    given: Mapping[str, Any]  # arguments from its name, such as the size of `window:3`

    def check(self) -> None:
        check_parameters(self.setting, self.name, self.make, (*OFFERED[self.kind], *self.given))

    def build(self, offered: Mapping[str, Any]) -> Any:
        known = {name: offered[name] for name in OFFERED[self.kind] if name in offered}
        return build(self.setting, self.name, self.make, {**known, **self.given})


def check_parts(tasks: TasksConfig, needs_index: bool = True, flag: str = "tasks.") -> None:
    """Raise a one-line error for a name that does not resolve, or resolves to something else than such a part."""
    _named(tasks, bool(tasks.index) or not needs_index, flag)


def build_parts(
    tasks: TasksConfig, tokenizer: Any, index: Index | None = None, flag: str = "tasks."
) -> tuple[Environment, Memory]:
    """The environment and the memory rule. Pass `index` if it is already open; it replaces `tasks.index`."""
    parts = _named(tasks, bool(tasks.index) or index is not None, flag)
    grading: Any = tasks.grading
    offered = {
        "codec": codec_of(tokenizer),
        "tokenizer": tokenizer,
        "topk": tasks.topk,
        "reward": reward_of(tasks.reward, grading, f"{flag}reward"),
        "grading": grading,
        "turns": tasks.turns,
    }
    if tasks.prompt:
        offered["prompt"] = read_prompt(tasks.prompt, f"{flag}prompt")
    if index is None and tasks.index and any("index" in parameters(part.make) for part in parts):
        index = open_index(tasks.index)
    if index is not None:
        offered["index"] = index
    environment, memory = parts
    return environment.build(offered), memory.build(offered)


def _named(tasks: TasksConfig, has_index: bool, flag: str) -> tuple[_Part, _Part]:
    grading: Any = tasks.grading
    reward_of(tasks.reward, grading, f"{flag}reward")
    world = resolve(f"{flag}environment", tasks.environment, ENVIRONMENTS, ("start", "step", "grade"))
    rule, size = named_rule(f"{flag}memory", tasks.memory)
    environment = _Part("environment", f"{flag}environment", tasks.environment, world, {})
    memory = _Part("memory", f"{flag}memory", tasks.memory, rule, size)
    if tasks.prompt:
        read_prompt(tasks.prompt, f"{flag}prompt")
    for name in ("turns", "prompt"):
        if getattr(tasks, name) and name not in parameters(world):
            raise ValueError(f"{flag}{name}: the environment {tasks.environment!r} has no parameter {name} to take it")
    for part in (environment, memory):
        part.check()
        if not has_index and parameters(part.make).get("index") is False:  # it has no default
            raise ValueError(f"{flag}index: name an index folder or the URL of a retrieval service to sample with")
    return environment, memory
