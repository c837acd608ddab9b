"""The agent connects an engine, an environment and a memory rule. It records every call as token ids.

    Agent(engine, environment, memory, tokenizer, sampling).play(tasks, seed)   yields episodes as they finish

Every episode advances by itself: when its call ends, it gets its observation, its memory is updated, and its next call
begins, while the calls of the others go on. Calls that end in the same step of the engine share one step of the
environment. The next task replaces a finished episode. The samples of an episode depend only on its own seed, not on
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
from memopd.engine.session import Session, open_session
from memopd.tasks import Task
from memopd.types import Call, Episode, Ids, Sampling, Segment


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


@dataclass(slots=True, eq=False)
class _Live:
    """An episode in progress."""

    id: str
    task: Task
    prefix: Ids  # q
    seed: int
    started: float
    stop: tuple[str, ...]  # the strings that end the next action
    prompt: _Prompt = field(init=False)  # of the open call
    update: Update | None = None  # of the memory, while it asks the model
    turns: list[Turn] = field(default_factory=list)
    responses: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    ended: float | None = None


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

    def graded(
        self, tasks: Iterable[Task | tuple[str, Task]], seed: int = 0, frees_model: bool = True
    ) -> Iterator[tuple[Episode, Outcome]]:
        """Yields episodes with the outcomes that the environment's `grade` returns for them.

        You may use the engine's model between two episodes. If you do not, `frees_model=False` saves the engine some
        milliseconds for each.
        """
        waiting = iter(tasks)
        live: dict[Request, _Live] = {}  # by the open request of each episode
        with open_session(self.engine) as session:
            while True:
                begun = [self._start(task, seed) for task in islice(waiting, self.batch - len(live))]
                live |= self._submit(session, begun)
                if not live:
                    return
                episodes = [_recorded(live.pop(request), completion) for request, completion in session.wait()]
                self._advance(episodes)
                live |= self._submit(session, [e for e in episodes if e.ended is None])
                if finished := [e for e in episodes if e.ended is not None]:
                    if frees_model:
                        session.pause()
                    for episode in finished:
                        yield self._finished(episode, seed)

    def _start(self, given: Task | tuple[str, Task], seed: int) -> _Live:
        id, task = (given.id, given) if isinstance(given, Task) else given
        opening = self.environment.start(task)
        if opening.text is None:
            raise ValueError(f"task {task.id!r}: the environment's start() gave no text to begin with")
        prefix = prefix_of(self.tokenizer, opening.text)
        check_fits(task, prefix, self.max_context)
        episode = _Live(id, task, prefix, episode_seed(seed, id), time.time(), opening.stop)
        self._act(episode, ())
        return episode

    def _submit(self, session: Session, episodes: Sequence[_Live]) -> dict[Request, _Live]:
        """Begin the next call of every episode."""
        requests = [
            Request(e.prompt.ids, e.prompt.seed, e.prompt.sampling, e.prompt.stop, e.id, e.prompt.purpose)
            for e in episodes
        ]
        session.submit(requests)
        return dict(zip(requests, episodes, strict=True))

    def _advance(self, episodes: Sequence[_Live]) -> None:
        """After a call of every episode: each gets its next prompt, or ends."""
        acted = [e for e in episodes if e.update is None]
        for episode in episodes:
            if episode.update is not None:
                self._resume(episode, episode.update, self._reply(episode))
        self._observe(acted)
        for episode in acted:
            if episode.ended is None:
                self._remember(episode)

    def _act(self, episode: _Live, pieces: Sequence[Piece]) -> None:
        """The next call is an action. An episode whose context leaves no room for a token ends."""
        ids, segments = assemble(episode.prefix, pieces)
        if len(ids) >= self.max_context:
            episode.ended = time.time()
        seed = call_seed(episode.seed, len(episode.turns))
        episode.prompt = _Prompt(ids, segments, seed, self.sampling, episode.stop)

    def _observe(self, acted: Sequence[_Live]) -> None:
        """Make one step of the environment. It retrieves what the memory rule derives from the agent's keywords."""
        for episode in acted:
            episode.responses.append(codec_of(self.tokenizer).decode(episode.calls[-1].completion))
        seen = self.environment.step([self._progress(e) for e in acted]) if acted else []
        if len(seen) != len(acted):
            raise ValueError(f"the environment's step() gave {len(seen)} observations for {len(acted)} episodes")
        for episode, observation in zip(acted, seen, strict=True):
            call = len(episode.calls) - 1
            if observation.reward:
                episode.calls[call] = replace(episode.calls[call], reward=observation.reward)
            if observation.text is None:
                episode.ended = time.time()
                continue
            ids, room = codec_of(self.tokenizer).encode(observation.text), self.max_context - 1 - len(episode.prefix)
            episode.turns.append(Turn(episode.calls[call].completion, ids, call, room=room))
            episode.stop = observation.stop

    def _progress(self, episode: _Live) -> Progress:
        responses = tuple(episode.responses)
        query = getattr(self.memory, "query", None)
        if query is None:
            return Progress(episode.task, responses)
        return Progress(episode.task, responses, partial(query, responses[-1]))

    def _remember(self, episode: _Live) -> None:
        """Update the memory, which may ask the model first."""
        made = self.memory.context(tuple(episode.turns))
        if isinstance(made, Generator):
            self._resume(episode, made, None)
        else:
            self._act(episode, self._pieces(made))

    def _resume(self, episode: _Live, update: Update, reply: Reply | None) -> None:
        try:
            ask = update.send(reply)  # type: ignore[arg-type]  # None starts it
        except StopIteration as done:
            episode.update = None
            self._act(episode, self._pieces(done.value))
        else:
            episode.update, episode.prompt = update, self._asked(episode, ask)

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

    def _reply(self, episode: _Live) -> Reply:
        """What the memory rule gets for the last call, which it asked for."""
        call = episode.calls[-1]
        text = codec_of(self.tokenizer).decode(call.completion)
        reply = Reply(call.completion, text, call.purpose, len(episode.calls) - 1)
        episode.turns[-1] = replace(episode.turns[-1], replies=(*episode.turns[-1].replies, reply))
        return reply

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


def _recorded(episode: _Live, done: Completion) -> _Live:
    """Add the call that ended to its episode."""
    name = f"episode {episode.id!r}: call {len(episode.calls)}"
    if not len(done.tokens):  # a Call cannot be empty, and its own error would not name the cause
        raise ValueError(f"{name}: the engine ended it ({done.stop}) before its first token: was the engine closed?")
    prompt = episode.prompt
    call = Call(
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
    episode.calls.append(call)
    return episode
