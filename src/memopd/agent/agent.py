"""The agent connects an engine, an environment and a memory rule. It records every call as token ids.

    Agent(engine, environment, memory, tokenizer, sampling).play(tasks, seed)   yields episodes as they finish

All live episodes advance together. Each round is one batch of actions, one step of the environment, and one update of
the memories; the next task replaces a finished episode. The samples of an episode depend only on its own seed, not on
the other episodes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from memopd.agent.codec import check_fits, codec_of, prefix_of
from memopd.agent.environment import Environment, Outcome, Progress
from memopd.agent.memory import Ask, Memory, Piece, Reply, Turn, Update, assemble
from memopd.engine.protocol import Completion, Engine, Request
from memopd.tasks import Task
from memopd.types import Call, Episode, Ids, Sampling, Segment


@dataclass(slots=True, eq=False)
class _Live:
    """An episode in progress."""

    id: str
    task: Task
    prefix: Ids  # q
    seed: int
    started: float
    stop: tuple[str, ...]  # the strings that end the next response
    pieces: Sequence[Piece] = ()  # x_t
    turns: list[Turn] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ended: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A call to make: the ids that it reads, and the fields that are recorded with it."""

    ids: Ids
    segments: tuple[Segment, ...]
    seed: int
    sampling: Sampling
    stop: tuple[str, ...]
    purpose: str = ""
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class Agent:
    engine: Engine
    environment: Environment
    memory: Memory
    tokenizer: Any  # the Hugging Face tokenizer of the engine's model
    sampling: Sampling = field(default_factory=Sampling)
    batch: int = 64  # episodes at the same time
    max_context: int = 4096  # tokens per prompt; an episode that needs more ends
    rule: str = ""  # the name of the memory rule, which is recorded

    def __post_init__(self) -> None:
        if self.batch < 1:  # no task would ever start, and `play` would silently yield nothing
            raise ValueError(f"Agent.batch must be 1 or more, got {self.batch!r}")

    def play(self, tasks: Iterable[Task | tuple[str, Task]], seed: int = 0) -> Iterator[Episode]:
        """Yields episodes in the order in which they finish. You may pass a task with the id for its episode."""
        for episode, _ in self.graded(tasks, seed):
            yield episode

    def graded(self, tasks: Iterable[Task | tuple[str, Task]], seed: int = 0) -> Iterator[tuple[Episode, Outcome]]:
        """Yields episodes with the outcomes that the environment's `grade` returns for them."""
        waiting = iter(tasks)
        live: list[_Live] = []
        while True:
            live += [self._start(task, seed) for task in islice(waiting, self.batch - len(live))]
            if not live:
                return
            self._act(live)
            self._observe(live)
            self._update([e for e in live if e.ended is None])
            for episode in live:
                if not self._fits(episode):  # its context leaves no room for another token
                    episode.ended = episode.ended or time.time()
                if episode.ended is not None:
                    yield self._finished(episode, seed)
            live = [e for e in live if e.ended is None]

    def _start(self, given: Task | tuple[str, Task], seed: int) -> _Live:
        id, task = (given.id, given) if isinstance(given, Task) else given
        opening = self.environment.start(task)
        if opening.text is None:
            raise ValueError(f"task {task.id!r}: the environment's start() gave no text to begin with")
        prefix = prefix_of(self.tokenizer, opening.text)
        check_fits(task, prefix, self.max_context)
        return _Live(id, task, prefix, episode_seed(seed, id), time.time(), opening.stop)

    def _act(self, live: Sequence[_Live]) -> None:
        """Every episode makes one action."""
        prompts = [
            _Prompt(*assemble(e.prefix, e.pieces), call_seed(e.seed, len(e.turns)), self.sampling, e.stop) for e in live
        ]
        for episode, call in zip(live, self._call(live, prompts), strict=True):
            episode.responses.append(codec_of(self.tokenizer).decode(call.completion))

    def _observe(self, live: Sequence[_Live]) -> None:
        """Make one step of the environment. It retrieves what the memory rule derives from the agent's keywords."""
        seen = self.environment.step([self._progress(e) for e in live])
        if len(seen) != len(live):
            raise ValueError(f"the environment's step() gave {len(seen)} observations for {len(live)} episodes")
        for episode, observation in zip(live, seen, strict=True):
            call = len(episode.calls) - 1
            if observation.reward:
                episode.calls[call] = replace(episode.calls[call], reward=observation.reward)
            if observation.text is None:
                episode.ended = time.time()
                continue
            ids = codec_of(self.tokenizer).encode(observation.text)
            episode.turns.append(Turn(episode.calls[call].completion, ids, call))
            episode.stop = observation.stop

    def _progress(self, episode: _Live) -> Progress:
        responses = tuple(episode.responses)
        query = getattr(self.memory, "query", None)
        if query is None:
            return Progress(episode.task, responses)
        return Progress(episode.task, responses, partial(query, responses[-1]))

    def _update(self, live: Sequence[_Live]) -> None:
        """Set the next context of every episode. Rules that call the model advance together, one batch per call."""
        updates: list[tuple[_Live, Update, Reply | None]] = []
        for episode in live:
            made = self.memory.context(tuple(episode.turns))
            if isinstance(made, Generator):
                updates.append((episode, made, None))
            else:
                episode.pieces = self._pieces(made)
        while updates:
            asking: list[tuple[_Live, Update, Ask]] = []
            for episode, update, reply in updates:
                try:
                    asking.append((episode, update, update.send(reply)))  # type: ignore[arg-type]  # None starts it
                except StopIteration as done:
                    episode.pieces = self._pieces(done.value)
            prompts = [self._asked(episode, ask) for episode, _, ask in asking]
            calls = self._call([episode for episode, *_ in asking], prompts)
            updates = [(e, update, self._reply(e, call)) for (e, update, _), call in zip(asking, calls, strict=True)]

    def _pieces(self, made: Any) -> Sequence[Piece]:
        if not isinstance(made, Sequence) or not made or not all(isinstance(piece, Piece) for piece in made):
            raise ValueError(f"memory {self.rule!r}: context() must return one or more pieces, got {made!r:.60}")
        return made

    def _asked(self, episode: _Live, ask: Ask) -> _Prompt:
        """A call that the memory rule makes for itself. It has its own seed, and the actions keep theirs."""
        if not isinstance(ask, Ask):
            raise ValueError(f"memory {self.rule!r}: context() must yield Ask, got {type(ask).__name__}")
        turn = episode.turns[-1]
        if isinstance(ask.prompt, str | np.ndarray):
            ids = prefix_of(self.tokenizer, ask.prompt) if isinstance(ask.prompt, str) else ask.prompt
            segments: tuple[Segment, ...] = (Segment("observation", 0, len(ids), turn.call),)  # new to the episode
        else:
            ids, segments = assemble(episode.prefix, ask.prompt)
        if len(ids) >= self.max_context:
            raise ValueError(
                f"episode {episode.id!r}: the memory rule's prompt for {ask.purpose!r} has {len(ids)} tokens, and "
                f"max_context is {self.max_context}: raise it, or ask with less"
            )
        limits = [limit for limit in (ask.max_tokens, self.sampling.max_tokens) if limit is not None]
        sampling = replace(self.sampling, max_tokens=min(limits, default=None))
        name = f"{len(episode.turns) - 1}/{ask.purpose}/{len(turn.replies)}"
        return _Prompt(
            ids, segments, episode_seed(episode.seed, name), sampling, ask.stop, ask.purpose, ask.trainable
        )  # fmt: skip

    def _reply(self, episode: _Live, call: Call) -> Reply:
        ids = call.completion
        reply = Reply(ids, codec_of(self.tokenizer).decode(ids), call.purpose, len(episode.calls) - 1)
        episode.turns[-1] = replace(episode.turns[-1], replies=(*episode.turns[-1].replies, reply))
        return reply

    def _call(self, live: Sequence[_Live], prompts: Sequence[_Prompt]) -> list[Call]:
        """Make one call for every episode, in one batch, and record it."""
        requests = [
            Request(p.ids, p.seed, p.sampling, p.stop, e.id, p.purpose) for e, p in zip(live, prompts, strict=True)
        ]
        completions = self.engine.generate(requests) if requests else []
        for episode, prompt, completion in zip(live, prompts, completions, strict=True):
            episode.calls.append(_recorded(episode, prompt, completion))
        return [episode.calls[-1] for episode in live]

    def _fits(self, episode: _Live) -> bool:
        return len(episode.prefix) + sum(len(p.ids) for p in episode.pieces) < self.max_context

    def _finished(self, episode: _Live, seed: int) -> tuple[Episode, Outcome]:
        outcome = self.environment.grade(episode.task, episode.responses)
        played = Episode(
            episode.id, episode.task.id, tuple(episode.calls), outcome.reward, self.sampling,
            seed, episode.started, episode.ended, self.rule,
        )  # fmt: skip
        return played, outcome


def repeat(tasks: Iterable[Task], samples: int = 1) -> Iterator[tuple[str, Task]]:
    """Yields every task `samples` times, with a different id for each episode of the group."""
    for task in tasks:
        for n in range(samples):
            yield (f"{task.id}/{n}" if samples > 1 else task.id), task


def episode_seed(seed: int, id: str) -> int:
    """63 bits that depend only on the run's seed and the episode's name."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=8).digest()) >> 1


def call_seed(seed: int, turn: int) -> int:
    return episode_seed(seed, str(turn))


def _recorded(episode: _Live, prompt: _Prompt, done: Completion) -> Call:
    name = f"episode {episode.id!r}: call {len(episode.calls)}"
    if not len(done.tokens):  # a Call cannot be empty, and its own error would not name the cause
        raise ValueError(f"{name}: the engine ended it ({done.stop}) before its first token: was the engine closed?")
    return Call(
        prompt.ids,
        done.tokens,
        done.logprobs,
        done.stop,
        trainable=prompt.trainable,
        purpose=prompt.purpose,
        policy_version=done.policy_version,
        segments=prompt.segments,
        name=name,
    )
