"""Import verifiers' traces.jsonl: a graph of messages, each with the ids that it adds.

    0 system ── 1 user ── 2 assistant ── 3 tool ── 4 assistant
           └─── 5 notes ── 6 assistant                        the history was rewritten here

The path from the root to a sampled message is what that call read and sampled, so each sampled message is one call, and
each is trained once, however many branches continue from it. A trace, one agent's part of a rollout, is an episode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from memopd import schema
from memopd.record.importers.calls import Finish, Numbers, Tokens, read_lines, sampling_fields
from memopd.record.store import StoreError
from memopd.types import Call, Episode, Sampling, StopReason


class _Part(BaseModel):
    """A part of a trace: what we read of it is checked, everything else is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Link(_Part):
    node: int
    type: str = ""


class _Node(_Part):
    parent: int | None = None
    sampled: bool = False
    token_ids: Tokens
    mask: list[bool]
    logprobs: Numbers | None = None
    semantic_parents: list[_Link] = []


class _Sampling(_Part):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class _ModelCall(_Part):
    node: int | None = None
    finish_reason: Finish | None = None
    sampling: _Sampling | None = None


class _Reward(_Part):
    score: float
    weight: float = 1.0


class _Task(_Part):
    key: str | None = None
    hash: str | None = None


class _Agent(_Part):
    name: str = "agent"
    trainable: bool = True


class _Trace(_Part):
    id: str
    task: _Task = _Task()
    agent: _Agent = _Agent()
    nodes: list[_Node]
    calls: list[_ModelCall] = []
    rewards: dict[str, _Reward | None] = {}


class _Policy(_Part):
    start: int


class _Work(_Part):
    policy: _Policy | None = None


class _Run(_Part):
    work: _Work | None = None


class _Group(_Part):
    id: str


class _Episode(_Part):
    traces: list[_Trace]
    group: _Group | None = None
    run: _Run | None = None


def import_verifiers(path: Path) -> Iterator[Episode]:
    """Yield the episodes of a traces.jsonl, one for each trace. A StoreError names the line and the node."""
    for number, given in read_lines(path):
        where = f"{path}: line {number}"
        try:
            # A line is an episode with its traces; `Trace.to_record` makes lines that are one trace.
            line = _Episode.model_validate({"traces": [given]} if "nodes" in given else given)
            for trace in line.traces:
                if calls := _calls(trace, _version(line)):
                    yield _episode(trace, calls, _task(trace, line))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise StoreError(f"{where}: {schema.place(first['loc'])}: {schema.message(first)}") from None
        except ValueError as error:
            raise StoreError(f"{where}: {error}") from None


def _calls(trace: _Trace, version: int) -> list[Call]:
    """The sampled messages, in the order in which they were sampled. A reply of no tokens at all is not a call."""
    calls = []
    model_calls = {call.node: call for call in trace.calls}
    usual = _usual_sampling(trace)
    accepted = {link.node for node in trace.nodes for link in node.semantic_parents if link.type == "compaction"}
    for number, node in enumerate(trace.nodes):
        name = f"trace {trace.id!r}: node {number}"
        if node.parent is not None and not 0 <= node.parent < number:
            raise ValueError(f"{name}: parent: must be an earlier node, got {node.parent}")
        if len(node.mask) != len(node.token_ids):
            raise ValueError(f"{name}: mask: {len(node.mask)} values for {len(node.token_ids)} token_ids")
        sampled = sum(node.mask)
        if node.sampled and not len(node.token_ids):
            raise ValueError(
                f"{name}: has no token_ids; verifiers records them with its training client only: set client.type "
                'to "train", or let the agent call `memopd gateway`'
            )
        if any(node.mask[: len(node.mask) - sampled]) or (sampled and not node.sampled):
            raise ValueError(f"{name}: mask: must mark the last ids of a sampled message and nothing else")
        if not sampled:
            continue
        path, made = _path(trace.nodes, number), model_calls.get(number)
        is_attempt = any(link.type == "compaction_attempt" for link in node.semantic_parents)
        calls.append(
            Call(
                path[:-sampled],
                path[-sampled:],
                node.logprobs if node.logprobs is not None and len(node.logprobs) else None,
                stop=StopReason(made.finish_reason) if made and made.finish_reason else None,
                # As in verifiers, a compaction that the agent did not continue from is not trained. A call that was
                # sampled from another distribution than the rest is context, because an episode has one distribution.
                trainable=trace.agent.trainable and (not is_attempt or number in accepted) and _sampling(made) == usual,
                policy_version=version,
                name=name,
            )
        )
    return calls


def _path(nodes: list[_Node], number: int | None) -> NDArray[Any]:
    """The ids from the root to a node."""
    parts = []
    while number is not None:
        parts.append(nodes[number].token_ids)
        number = nodes[number].parent
    return np.concatenate(parts[::-1])


def _sampling(call: _ModelCall | None) -> Sampling:
    given = call.sampling.model_dump(exclude_none=True) if call and call.sampling else {}
    return Sampling(**sampling_fields(given))


def _usual_sampling(trace: _Trace) -> Sampling:
    counted = Counter(_sampling(call) for call in trace.calls if call.node is not None)
    return counted.most_common(1)[0][0] if counted else Sampling()


def _episode(trace: _Trace, calls: list[Call], task: str) -> Episode:
    reward = sum(given.score * given.weight for given in trace.rewards.values() if given)
    return Episode(trace.id, task, tuple(calls), float(reward), _usual_sampling(trace))


def _task(trace: _Trace, line: _Episode) -> str:
    """Traces of one agent on one task form a group: the trainer's own group where it gave one."""
    task = line.group.id if line.group else trace.task.key or trace.task.hash or trace.id
    return task if len(line.traces) == 1 else f"{task}/{trace.agent.name}"


def _version(line: _Episode) -> int:
    policy = line.run.work.policy if line.run and line.run.work else None
    return policy.start if policy else 0


def is_trace(line: dict[str, Any]) -> bool:
    """Whether a line of JSON is one of verifiers', for the detection of formats."""
    return isinstance(line.get("nodes" if "nodes" in line else "traces"), list)
