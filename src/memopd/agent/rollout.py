"""Episodes: engine × environment × memory rule, in lock step, every call recorded as the ids it read and sampled.

Each round makes one call for every live episode and one retrieval request for all of them; a finished episode's place
goes to the next task. What an episode samples depends on its own seed alone, not on what runs beside it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from memopd.agent.environment import Environment, Observation, Progress
from memopd.agent.memory import Codec, Memory, Piece, Turn, assemble
from memopd.engine.protocol import Completion, Engine, Request
from memopd.tasks import Task
from memopd.types import Call, Episode, Ids, Sampling, Segment


@dataclass(slots=True, eq=False)
class _Live:
    """An episode on its way."""

    id: str
    task: Task
    prefix: Ids  # q
    seed: int
    started: float
    stop: tuple[str, ...]
    pieces: list[Piece] = field(default_factory=list)  # x_t
    turns: list[Turn] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def prompt(self) -> tuple[Ids, tuple[Segment, ...]]:
        return assemble(self.prefix, self.pieces)


def rollout(
    engine: Engine,
    environment: Environment,
    memory: Memory,
    tokenizer: Any,
    tasks: Iterable[tuple[str, Task]],  # the id of the episode to be, its task
    sampling: Sampling,
    seed: int,
    batch: int = 64,
    max_context: int = 4096,
    rule: str = "",  # the memory rule's name, recorded
) -> Iterator[Episode]:
    """Episodes in the order in which they finish."""
    codec = codec_of(tokenizer)
    waiting = iter(tasks)
    live: list[_Live] = []
    while True:
        for id, task in islice(waiting, batch - len(live)):
            live.append(_start(environment, tokenizer, id, task, seed, max_context))
        if not live:
            return
        prompts = [episode.prompt() for episode in live]
        completions = engine.generate(
            [
                Request(prompt, call_seed(e.seed, len(e.calls)), sampling, e.stop, e.id)
                for e, (prompt, _) in zip(live, prompts, strict=True)
            ]
        )
        for episode, (prompt, segments), completion in zip(live, prompts, completions, strict=True):
            _record(episode, prompt, segments, completion, codec)
        going: list[_Live] = []
        for episode, seen in zip(live, environment.step([_progress(e) for e in live]), strict=True):
            _observe(episode, seen, memory, codec)
            fits = len(episode.prefix) + sum(len(p.ids) for p in episode.pieces) < max_context
            if seen.text is not None and fits:
                going.append(episode)
            else:  # answered, gave up, or its context has no room for another word
                outcome = environment.grade(episode.task, episode.responses)
                yield Episode(
                    episode.id, episode.task.id, tuple(episode.calls), outcome.reward, sampling,
                    seed, episode.started, time.time(), rule,
                )  # fmt: skip
        live = going


def repeat(tasks: Iterable[Task], samples: int = 1) -> Iterator[tuple[str, Task]]:
    """Every task `samples` times: a group of episodes with ids of their own."""
    for task in tasks:
        for n in range(samples):
            yield (f"{task.id}/{n}" if samples > 1 else task.id), task


def codec_of(tokenizer: Any) -> Codec:
    def encode(text: str) -> Ids:
        return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(ids: Ids) -> str:
        return str(tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return Codec(encode, decode)


def prefix_of(tokenizer: Any, message: str) -> Ids:
    """q: the chat template of the user turn, and the opening of the assistant's."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return codec_of(tokenizer).encode(text)


def check_fits(task: Task, prefix: Ids, limit: int, setting: str = "max_context") -> None:
    if len(prefix) >= limit:
        raise ValueError(
            f"task {task.id!r}: what it asks has {len(prefix)} tokens, and {setting} is {limit}: raise it, or leave "
            "the task out"
        )


def episode_seed(seed: int, id: str) -> int:
    """63 bits that depend on the run's seed and the episode's name, and on nothing else."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=8).digest()) >> 1


def call_seed(seed: int, turn: int) -> int:
    return episode_seed(seed, str(turn))


def _start(environment: Environment, tokenizer: Any, id: str, task: Task, seed: int, max_context: int) -> _Live:
    opening = environment.start(task)
    if opening.text is None:
        raise ValueError(f"task {task.id!r}: the environment's start() gave no text to begin with")
    prefix = prefix_of(tokenizer, opening.text)
    check_fits(task, prefix, max_context)
    return _Live(id, task, prefix, episode_seed(seed, id), time.time(), opening.stop)


def _record(episode: _Live, prompt: Ids, segments: tuple[Segment, ...], done: Completion, codec: Codec) -> None:
    call = Call(
        prompt,
        done.tokens,
        done.logprobs,
        done.stop,
        policy_version=done.policy_version,
        segments=segments,
        name=f"episode {episode.id!r}: call {len(episode.calls)}",
    )
    episode.calls.append(call)
    episode.responses.append(codec.decode(call.completion))


def _progress(episode: _Live) -> Progress:
    return Progress(episode.task, tuple(episode.responses))


def _observe(episode: _Live, seen: Observation, memory: Memory, codec: Codec) -> None:
    if seen.reward:
        episode.calls[-1] = replace(episode.calls[-1], reward=seen.reward)
    if seen.text is None:
        return
    episode.turns.append(Turn(episode.calls[-1].completion, codec.encode(seen.text)))
    episode.pieces = memory.context(episode.turns)
    episode.stop = seen.stop
