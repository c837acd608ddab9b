"""The one way of every call: ids, engine, journal, answer. Recording, order, durability and drift are here alone.

begin ──> prompt's ids ──> engine ──> journal, durable ──> said or stream
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from memopd.engine.protocol import Completion, LiveEngine
from memopd.gateway.ask import ApiError, Ask, Json, Said, Token
from memopd.gateway.calls import Label, RunningCall
from memopd.gateway.drift import History
from memopd.gateway.episodes import Ending, Ledger, Recorded
from memopd.gateway.prompt import Prompts
from memopd.gateway.text import Cut, StreamedText, cut_text
from memopd.gateway.tools import Parsed, with_ids
from memopd.record.journal import JournalError
from memopd.types import Call, StopReason

log = logging.getLogger(__name__)


class Recorder:
    def __init__(self, engine: LiveEngine, ledger: Ledger, model: str, store_delay: float) -> None:
        self._engine, self._ledger, self._model, self._store_delay = engine, ledger, model, store_delay
        self._max_length = getattr(engine, "max_length", None)  # an engine of your own may not have it
        self._prompts = Prompts(engine.tokenizer, self._max_length)
        self._running: dict[str, set[RunningCall]] = {}
        self._finishing: dict[str, tuple[Ending, asyncio.Event]] = {}  # each event is set when that is over
        self._finished = asyncio.Event()  # set while finished episodes are not in the store yet
        self._compactor: asyncio.Task[None] | None = None

    # Start and stop

    def start(self) -> None:
        if self._ledger.waiting:
            self._finished.set()
        self._compactor = asyncio.create_task(self._compact_forever())

    async def stop(self) -> None:
        """Record running calls as aborted, and write finished episodes to the store."""
        for call in (calls := [call for group in self._running.values() for call in group]):
            call.cancel()
        if calls:  # wait no longer for an engine that does not respond
            await asyncio.wait([call.task for call in calls], timeout=10)
        if self._compactor:
            self._compactor.cancel()
            await asyncio.wait([self._compactor])
        await asyncio.to_thread(self._compact)
        self._ledger.close()
        self._prompts.threads.shutdown()

    async def _compact_forever(self) -> None:
        while True:
            await self._finished.wait()
            await asyncio.sleep(self._store_delay)
            self._finished.clear()
            await asyncio.to_thread(self._compact)
            if self._ledger.waiting:  # writing failed, or another episode finished meanwhile
                self._finished.set()

    def _compact(self) -> None:
        try:
            self._ledger.compact()
        except (ValueError, OSError) as error:  # nothing is lost: the journal still has the episodes
            log.error("finished episodes are not in the store yet: %s", error)

    # Episodes

    @property
    def state(self) -> tuple[Json, JournalError | None]:
        """What is going on, and why nothing more can be recorded, if so."""
        opened, finished = self._ledger.counts
        running = sum(map(len, self._running.values()))
        state = {"model": self._model, "policy_version": self._engine.version}
        return state | {"open": opened, "finished": finished, "running": running}, self._ledger.broken

    def summary(self, name: str) -> Json:
        reward, recorded = self._ledger.reward(name), self._ledger.calls(name)
        if reward is None and not recorded:
            raise _no_episode(name)
        histories = [r.history for r in recorded]
        return {
            "episode": name,
            "finished": reward is not None,
            "reward": reward,
            "stored": reward is not None and not recorded,  # then only the store has its calls
            "running": len(self._running.get(name, ())),
            "calls": len(recorded),
            "aborted": sum(r.call.stop is StopReason.ABORTED for r in recorded),
            "prompt_tokens": sum(len(r.call.prompt) for r in recorded),
            "completion_tokens": sum(len(r.call.completion) for r in recorded),
            "drift": [{"call": t} | asdict(h) for t, h in enumerate(histories) if h.replies],
        }

    async def finish(self, name: str, reward: float, task: str | None) -> None:
        """End an episode. Ending it again in the same way is no error: a client may repeat its request."""
        while begun := self._finishing.get(name):
            ending, over = begun
            _check_repeat(name, ending, reward, task)
            await over.wait()
        self._check_journal()
        if known := self._ledger.ending(name):
            _check_repeat(name, known, reward, task)
            return
        over = asyncio.Event()
        self._finishing[name] = Ending(reward, task or name), over  # refuses new calls
        try:
            while calls := self._running.get(name):
                await asyncio.wait([call.task for call in calls])
            if not self._ledger.calls(name):
                raise _no_episode(name)
            await self._durable(self._ledger.finish(name, reward, task))
            self._finished.set()
        finally:
            del self._finishing[name]
            over.set()

    # One call

    def check_model(self, name: str) -> None:
        if name != self._model:
            message = f"there is no model {name[:60]!r}, only {self._model!r}"
            raise ApiError(404, "model_not_found", message, "model")

    def begin(self, label: Label, ask: Ask) -> RunningCall:
        self.check_model(ask.model)
        self._prompts.check(ask)
        self._check_journal()
        name = label.episode
        if self._ledger.reward(name) is not None or name in self._finishing:
            raise ApiError(409, "episode_finished", f"episode {name!r} is finished: it has its reward")
        call = RunningCall(label, self._ledger.next_number(), ask)
        group = self._running.setdefault(name, set())
        group.add(call)

        def remove(_: object) -> None:
            group.discard(call)
            if not group and self._running.get(name) is group:
                del self._running[name]

        call.start(self._run(call))
        call.task.add_done_callback(remove)
        return call

    async def count(self, episode: str, ask: Ask) -> int:
        """The number of tokens in the prompt of such a call. Nothing is recorded."""
        self.check_model(ask.model)
        self._prompts.check(ask)
        ids, _ = await self._prompt(episode, ask)
        return len(ids)

    async def _prompt(self, episode: str, ask: Ask) -> tuple[list[int], History]:
        loop, earlier = asyncio.get_running_loop(), self._ledger.calls(episode)
        return await loop.run_in_executor(self._prompts.threads, self._prompts.ids, ask, earlier)

    async def _run(self, call: RunningCall) -> Completion:
        """Encode the prompt, sample from the engine, and record the completion."""
        self._note_sampling(call)
        call.prompt, call.history = await self._prompt(call.episode, call.ask)
        call.grammar = self._prompts.grammar(call.ask)
        self._limit(call)
        if call.history.drifted:
            first = call.history.first
            where = "" if first is None else f", first at position {first}"
            log.warning(
                "%s: %d of %d earlier replies came back as other ids than were sampled%s",
                call.name, call.history.drifted, call.history.replies, where,
            )  # fmt: skip
        try:
            completion = await call.submit(self._engine)
        except ValueError as error:
            raise ApiError(400, "refused_by_engine", str(error)) from None
        except Exception as error:
            call.failure = " ".join(f"{type(error).__name__}: {error}".split())
            completion = Completion(np.asarray(call.tokens, np.int32), None, StopReason.ABORTED, self._engine.version)
        if call.cancelled:
            log.warning("%s: the client hung up after %d tokens", call.name, len(completion.tokens))
            completion = replace(completion, stop=StopReason.ABORTED)
        if len(completion.tokens):
            await self._durable(self._ledger.add(self._recorded(call, completion)))
        return completion

    def _limit(self, call: RunningCall) -> None:
        """Cut a token limit that the context has no room for; the engine refuses a prompt without any room."""
        asked = call.sampling.max_tokens
        if asked is None or self._max_length is None:
            return
        room = self._max_length - len(call.prompt)
        if 0 < room < asked:
            call.cut, call.sampling = asked, replace(call.sampling, max_tokens=room)

    def _note_sampling(self, call: RunningCall) -> None:
        """Say at the first call of an episode that is sampled so, not at its end, what training will ask of it."""
        note = call.training_note
        earlier = [r.sampling.training_note for r in self._ledger.calls(call.episode) if r.call.trainable]
        others = [c.training_note for c in self._running[call.episode] if c is not call]
        if note and not call.ask.is_constrained and note not in [*earlier, *others]:
            log.warning("%s: %s", call.name, note)

    def _recorded(self, call: RunningCall, completion: Completion) -> Recorded:
        recorded = Call(
            np.asarray(call.prompt, np.int32),
            completion.tokens,
            completion.logprobs,
            completion.stop,
            trainable=call.trainable,
            purpose=call.label.purpose,
            policy_version=completion.policy_version,
            name=call.name,
        )
        shown = len(self._cut(call, completion).visible)
        return Recorded(
            call.episode, call.number, recorded, call.sampling, call.ask.seed,
            call.started, time.time(), shown, call.history,
        )  # fmt: skip

    def _check_journal(self) -> None:
        """Refuse a request that could not be recorded."""
        if broken := self._ledger.broken:
            raise ApiError(503, "not_recorded", str(broken))

    async def _durable(self, future: Any) -> None:
        try:
            await asyncio.wrap_future(future)
        except JournalError as error:
            raise ApiError(503, "not_recorded", str(error)) from None

    # The answer to a call

    async def said(self, call: RunningCall, call_ids: str) -> Said:
        """The answer, after the call is in the journal. The ids of its tool calls begin with `call_ids`."""
        completion = await call.task
        if completion.stop is StopReason.ABORTED:
            message = "the engine stopped before the end; the tokens sampled so far are recorded as an aborted call"
            raise ApiError(503, "engine_stopped", message, cause=call.failure)
        cut, form = self._cut(call, completion), self._prompts.form
        parsed = Parsed(cut.visible)
        if call.ask.tools:
            parsed = form.parse_whole(self._engine.tokenizer, cut.visible, cut.full, call.prompt, call.ask.tools)
        digest = hashlib.blake2s(f"{call.episode}/{call.number}".encode(), digest_size=11).hexdigest()
        return Said(
            parsed.text,
            with_ids(parsed.calls if call.ask.parallel else parsed.calls[:1], call_ids + digest),
            parsed.reasoning,
            str(completion.stop),
            cut.stopped_by,
            call.prompt,
            completion.tokens.tolist(),
            self._tokens(completion) if call.ask.logprobs else None,
        )

    async def stream(self, call: RunningCall) -> AsyncIterator[str]:
        """The pieces of the answer's text that are certain to be text, as they are sampled."""
        ask, form = call.ask, self._prompts.form
        text = StreamedText(self._engine.tokenizer, ask.stop, ask.keep_stop, self._marks(ask))
        seen, whole, given = 0, "", 0
        while not call.task.done():
            call.progress.clear()
            new = call.tokens[seen:]
            seen += len(new)  # not len(call.tokens): the engine's thread may have added tokens meanwhile
            whole += text.feed(new)
            end = form.certain(whole) if ask.tools else len(whole)
            if end > given:
                yield whole[given:end]
                given = end
            if len(call.tokens) == seen and not call.task.done():
                await call.progress.wait()

    def _marks(self, ask: Ask) -> tuple[str, ...]:
        return self._prompts.form.marks if ask.tools else ()

    def _cut(self, call: RunningCall, completion: Completion) -> Cut:
        ask = call.ask
        return cut_text(self._engine.tokenizer, completion.tokens, ask.stop, ask.keep_stop, self._marks(ask))

    def _tokens(self, completion: Completion) -> list[Token] | None:
        if completion.logprobs is None:
            return None

        def text(id: int) -> str:
            return str(self._engine.tokenizer.decode([id]))

        tops = completion.top or [()] * len(completion.tokens)
        return [
            Token(text(id), logprob, tuple((text(i), p) for i, p in top))
            for id, logprob, top in zip(completion.tokens.tolist(), completion.logprobs.tolist(), tops, strict=True)
        ]


def _no_episode(name: str) -> ApiError:
    return ApiError(404, "no_such_episode", f"episode {name!r} has no recorded call")


def _check_repeat(name: str, known: Ending, reward: float, task: str | None) -> None:
    """Refuse to end an episode in another way than it ended. A request without a task does not change it."""
    if reward != known.reward:
        other = f"the reward {known.reward}"
    elif task and known.task is not None and task != known.task:
        other = f"the task {known.task!r}"
    else:
        return
    raise ApiError(409, "episode_finished", f"episode {name!r} already has {other}")
