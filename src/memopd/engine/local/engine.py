"""Samples from a Hugging Face model in this process, on a CPU or a GPU.

You may submit requests at any time and from any thread. Between two steps, finished sequences leave and waiting ones
enter. A step is one forward pass over one flat row: the next token of every running sequence, and the prompts of those
that enter. The thread that runs the steps exists only while there is work, and uses the model only then.

Between two steps a session (`session.py`) holds the engine until its caller has submitted what follows, so that its
results do not depend on the clock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.engine.guide import guides_of
from memopd.engine.local.attention import check_model
from memopd.engine.local.cache import WORTHWHILE, Cache, Slots
from memopd.engine.local.passes import STEPS, Passes, Row
from memopd.engine.local.sequence import FlatRow, SampledSequence, draw_tokens, end_tokens, read_request
from memopd.engine.local.session import LocalSession
from memopd.engine.protocol import Completion, Request, Ticket
from memopd.engine.stops import stops_of
from memopd.models.attention import sampling_attention
from memopd.models.support import length_limit
from memopd.types import StopReason

log = logging.getLogger("memopd")

# New prompt tokens per pass; a longer prompt gets a pass of its own. Short rows suit a CPU's caches, long ones a GPU.
PASS_TOKENS = {"cpu": 1024, "cuda": 8192}

# On a GPU a pass in which prompts enter takes as long as E steps, and every running sequence waits for it. If prompts
# enter every n steps and a call samples L tokens, the passes cost E/n and the time before a call enters n/2L of the
# sampling time; the sum is least at n = √(2EL). So if fewer than 1/FEW as many requests of sessions wait as sequences
# run, they wait for up to REPLAYS replays since prompts last entered. The rule counts steps and reads no clock. Other
# requests enter at once.
FEW, REPLAYS = 4, 2


class LocalEngine:
    """Samples from `model`: at most `slots` sequences at once, of at most `max_length` tokens including the prompt.

    You may pass a model that is being trained: the engine does not copy it, and restores its attention and its modes
    whenever no request is open. Change its weights between batches, then set `version`; or use `updating` or `update`
    at any time.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        slots: int = 64,
        max_length: int | None = None,
        version: int = 0,
        fused: bool = False,  # on a GPU: compile the layers, which takes a while and halves the time of a step
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots must be 1 or more, got {slots}")
        check_model(model)
        self.model, self.tokenizer = model, tokenizer
        self.max_length = length_limit(model, max_length)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self._version = version
        self._device = next(model.parameters()).device
        self._ends = end_tokens(model, tokenizer)
        self._stops = None if tokenizer is None else stops_of(tokenizer, self.vocabulary)
        self._guides = None if tokenizer is None else guides_of(tokenizer, self.vocabulary, self._ends)
        self._slots, self._cache = Slots(slots, self.max_length), Cache(slots, self.max_length)
        self._passes = Passes(model, self._cache, fused)
        self._running: list[SampledSequence] = []  # in the order of their slots
        self._replays = 0  # since prompts last entered
        self.runs_ahead = self._device.type == "cuda"  # a CPU would compute for the caller and the engine in turn
        self._weights: list[tuple[int, int]] = []  # address and version counter of every parameter
        self._tuned: list[Any] = []  # the layers with adapters
        self._active: list[tuple[Any, ...]] = []  # which adapters compute in each of them

        self._lock = threading.Condition()  # guards the attributes below
        self._waiting: dict[SampledSequence, None] = {}
        self._cancelled: list[SampledSequence] = []  # before they entered
        self._sessions: set[LocalSession] = set()  # that hold the engine between steps
        self._thread: threading.Thread | None = None
        self._paused = False
        self._updater: threading.Thread | None = None  # that is in `updating`
        self._closed = False

    # ---- the public methods, for any thread -----------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions in the order of the requests."""
        self._check_can_wait()
        tickets = self._enter([self._read(r) for r in requests])
        try:
            return [t.completion.result() for t in tickets]
        except BaseException:  # an error, or a keyboard interrupt
            for ticket in tickets:
                ticket.cancel()
            wait([t.completion for t in tickets])  # the engine no longer uses the model when the caller goes on
            raise

    def submit(self, request: Request, on_token: Callable[[int], None] | None = None) -> Ticket:
        """Start a request beside the running ones. The engine's thread calls `on_token` with every sampled id."""
        sequence = self._read(request)
        sequence.on_token = on_token
        return self._enter([sequence])[0]

    def session(self) -> LocalSession:
        """For a caller whose next requests depend on completions, such as an agent."""
        return LocalSession(self)

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        with self.updating(version):
            pass

    @contextmanager
    def updating(self, version: int | None) -> Iterator[None]:
        """Pauses sampling, so that you can change the weights inside the block. With None, the version stays.

        Running requests finish first, with the old version; waiting ones continue with the new version. Inside the
        block, this thread may submit requests, but what waits for the engine raises a `RuntimeError`.
        """
        with self._lock:
            self._check_can_wait()
            self._lock.wait_for(lambda: not self._paused)
            self._paused, self._updater = True, threading.current_thread()
            self._start()  # a session that nobody waits for may have requests that run
            self._lock.wait_for(lambda: self._thread is None)
        try:
            yield
            if version is not None:
                self._version = version
        finally:
            with self._lock:
                self._slots.invalidate()
                self._paused, self._updater = False, None
                self._start()

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy `weights` (a state dict) into the model. You do not need this if you train this very model."""
        own = dict(self.model.named_parameters())  # lists tied weights once
        if missing := sorted(own.keys() - weights.keys()):
            raise ValueError(f"the update lacks {len(missing)} of the model's parameters, {missing[0]} among them")
        for name, parameter in own.items():  # checked before any is copied: half an update would mix two models
            if weights[name].shape != parameter.shape:
                shapes = f"{tuple(weights[name].shape)} for {tuple(parameter.shape)}"
                raise ValueError(f"the update is of another model: {name} has shape {shapes}")
        with self.updating(version), torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])

    @property
    def cache_bytes(self) -> int:
        """The memory that the cache takes on its device; a CPU commits only what was written."""
        return self._cache.bytes

    def release(self) -> None:
        """Give the memory of the cache and of the CUDA graphs back, once no request runs. The next request takes it
        again, and gets the same completion."""
        with self.updating(None):  # the version may become another one while this waits
            self._passes.release()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # so that others can cut it into pieces of any size

    def close(self) -> None:
        """End running and waiting requests as aborted, and accept no more."""
        with self._lock:
            self._closed = True  # running requests end at their next token
            self._went_ahead(self._sessions)
            self._start()
            waiting = list(self._waiting)
        for sequence in waiting:
            self._cancel(sequence)
        with self._lock:
            if self._thread is not threading.current_thread():
                self._lock.wait_for(lambda: self._thread is None)

    def _check_can_wait(self) -> None:
        """Refuse to wait for the engine in a thread for which the engine waits: neither would ever go on."""
        me = threading.current_thread()
        if me is self._thread:
            raise RuntimeError("the engine's own thread, as in `on_token`, would wait for itself: use another thread")
        if me is self._updater:
            raise RuntimeError(
                "this thread is inside `engine.updating` (or `update`), which holds the engine back: leave it first"
            )

    # ---- entering and leaving -------------------------------------------------------------------------------------

    def _read(self, request: Request) -> SampledSequence:
        return read_request(request, self.max_length, self.vocabulary, self._stops, self._guides)

    def _enter(self, sequences: Sequence[SampledSequence]) -> list[Ticket]:
        with self._lock:
            if self._thread is not threading.current_thread():
                self._lock.wait_for(lambda: not any(session.ahead for session in self._sessions))
            if self._closed:
                raise ValueError("this engine is closed: make a new one")
            for sequence in sequences:
                sequence.future.set_running_or_notify_cancel()  # only the ticket can cancel it
                self._waiting[sequence] = None
            self._start()
        return [Ticket(s.future, partial(self._cancel, s)) for s in sequences]

    def _start(self) -> None:
        """Start the thread if there is work, or wake it if sessions hold it."""
        self._lock.notify_all()
        if self._thread is None and self._is_awaited():
            self._thread = threading.Thread(target=self._work, name="memopd-engine", daemon=True)
            self._thread.start()

    def _cancel(self, sequence: SampledSequence) -> None:
        sequence.cancelled = True
        with self._lock:
            if sequence not in self._waiting:
                self._start()  # if it runs, it ends at its next token
                return
            del self._waiting[sequence]
            if self._thread is not None:  # it may be using the model: it answers when it has released it
                self._cancelled.append(sequence)
                self._lock.notify_all()
                return
        self._deliver([sequence.end(StopReason.ABORTED, self._version)])

    # ---- the engine's thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        finished: list[SampledSequence] = []
        alive = True
        try:
            with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
                while alive:
                    self._serve(finished)
                    with self._lock:
                        alive = self._is_awaited()
                        finished += self._end(alive)
                        if not alive:  # before the end of the thread is seen: a session gets all that ended until then
                            self._hand_over(finished)
        except BaseException as why:  # every caller must get an answer, or would wait for ever
            with self._lock:
                waiting, self._waiting = list(self._waiting), {}
                finished += self._fail([*self._running, *waiting], why) + self._end(alive=False)
        self._deliver(finished)  # only now: the last completion arrives after the engine has released the model

    def _end(self, alive: bool) -> list[SampledSequence]:
        """Note the end of the thread unless it is `alive`; return the requests that were cancelled while waiting."""
        if not alive:
            self._thread = None
            self._went_ahead(self._sessions)
            self._lock.notify_all()
        cancelled, self._cancelled = self._cancelled, []
        return [s.end(StopReason.ABORTED, self._version) for s in cancelled]

    def _serve(self, finished: list[SampledSequence]) -> None:
        """Run steps as long as somebody waits for a request. The last step's completions stay in `finished`."""
        self._check_weights()
        ahead: list[LocalSession] = []  # the sessions whose callers work while the step runs
        with sampling_attention(self.model):
            while self._goes_on(finished, ahead):
                with self._lock:
                    ahead = [session for session in self._sessions if session.ahead]
                finished += self._step()

    def _went_ahead(self, sessions: Iterable[LocalSession]) -> None:
        for session in sessions:
            session.ahead = False

    def _goes_on(self, finished: list[SampledSequence], ahead: list[LocalSession]) -> bool:
        """Whether to run another step. If sessions hold the engine, wait for their callers to decide it."""
        if ahead:
            self._deliver(finished)
            with self._lock:
                self._went_ahead(ahead)
                self._lock.notify_all()
        while True:
            with self._lock:
                finished += self._end(alive=True)
                awaited, held = self._is_awaited(), bool(self._sessions) and not self._paused and not self._closed
                if held and not awaited and not finished:
                    self._went_ahead(self._sessions)  # no step is left to run: the requests were cancelled
                    self._lock.notify_all()
                    self._lock.wait()
                    continue
            if awaited or held:  # deliver now: these need not wait for the sequences that still run
                self._deliver(finished)
            if awaited or not held:
                return awaited

    def _is_awaited(self) -> bool:
        """Whether somebody waits for a request that runs or may enter."""
        if self._paused or self._closed:
            return bool(self._running)
        return any(s.is_awaited for s in chain(self._running, self._waiting))

    def _deliver(self, finished: list[SampledSequence]) -> None:
        for sequence in finished:
            sequence.deliver()
        with self._lock:  # a session gets all of its requests that ended in a step at once
            self._hand_over(finished)
        finished.clear()

    def _hand_over(self, finished: Iterable[SampledSequence]) -> None:
        """Give every session its requests, once. Whoever takes them waits for `deliver`."""
        for sequence in finished:
            if sequence.session is not None:
                sequence.session.ended.append(sequence)
                sequence.session = None
        self._lock.notify_all()

    def _check_weights(self) -> None:
        """Drop cached keys and values if the weights changed without a new `version`: they belong to the old ones.

        Another active adapter is such a change. It changes no weight, and CUDA graphs compute with the old one.
        """
        weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.model.parameters()]
        changed = weights != self._weights
        if changed:  # perhaps by a new adapter
            self._weights, self._tuned = weights, _tuned_layers(self.model)
        active = [(*layer.active_adapters, layer.disable_adapters) for layer in self._tuned]
        if active != self._active:
            changed, self._active = True, active
            self._passes.graphs = None
        if changed:
            self._slots.invalidate()
            if self._running:  # of a session that was paused
                raise ValueError("the weights changed while requests were open: change them in `engine.updating(...)`")

    def _step(self) -> list[SampledSequence]:
        """Run one step, or a few; return the sequences that finished."""
        entering: list[tuple[SampledSequence, int]] = []
        try:
            if not self._gathers():
                self._admit(entering)
            if not entering and self._can_replay():
                return self._replay()
            return self._pass(entering)
        except Exception as why:  # raised to the callers of these sequences; the thread continues with the waiting ones
            return self._fail([*self._running, *(s for s, _ in entering)], why)

    def _fail(self, sequences: Sequence[SampledSequence], why: BaseException) -> list[SampledSequence]:
        """Raise `why` to the callers of all running sequences, and empty the cache for the next ones."""
        self._running = []
        self._slots = Slots(len(self._slots.tokens), self.max_length)
        self._passes.release()  # now: the frames in the error's traceback still refer to the cache
        return [s.end(why, self._version) for s in sequences]

    def _gathers(self) -> bool:
        """Whether the waiting requests do not enter yet, because more should enter with them."""
        if self._replays >= REPLAYS or not self._can_replay():
            return False
        with self._lock:
            few = len(self._waiting) * FEW < len(self._running)
            return few and all(s.session is not None for s in self._waiting)

    def _admit(self, entering: list[tuple[SampledSequence, int]]) -> None:
        """Add sequences to `entering`, each with the number of prompt tokens copied from a slot with that prefix."""
        slots, source, target, tokens = self._slots, [], [], 0
        origin: dict[int, int] = {}  # the slot that holds the copied rows of a slot before this pass
        with self._lock:
            if not slots.free or self._paused:
                return
            first = list(islice(self._waiting, len(slots.free)))
            first.sort(key=lambda s: len(s.prompt))  # neighbours of similar length can share a call of the kernel
            places = slots.oldest(len(first))
            for sequence in first:
                match = slots.match(sequence.prompt)
                if match.coming - match.ready >= WORTHWHILE:
                    continue  # the next pass can copy what this one computes
                new = len(sequence.prompt) - match.ready
                if entering and tokens + new > PASS_TOKENS.get(self._device.type, 1024):
                    break
                sequence.slot, tokens = places[len(entering)], tokens + new
                if match.ready:
                    rows, origin[sequence.slot] = np.arange(match.ready), origin.get(match.slot, match.slot)
                    source.append(rows + origin[sequence.slot] * self.max_length)
                    target.append(rows + sequence.slot * self.max_length)
                    slots.mark_used(match.slot)
                slots.assign(sequence.slot, sequence.prompt, match.ready)
                del self._waiting[sequence]
                entering.append((sequence, match.ready))
        if source:
            self._cache.copy(*(self._passes.tensor(np.concatenate(rows)) for rows in (source, target)))

    def _pass(self, entering: Sequence[tuple[SampledSequence, int]]) -> list[SampledSequence]:
        """One forward pass: a token of every running sequence, and the new tokens of the prompts that enter."""
        row = FlatRow.of(self._running, entering, self.max_length)
        logits = self._passes.logits(row)
        self._slots.filled(s.slot for s, _ in entering)
        everyone = [*self._running, *(s for s, _ in entering)]
        tokens, logprobs = draw_tokens(everyone, logits)
        if entering:
            self._running, self._replays = sorted(everyone, key=lambda s: s.slot), 0
            self._passes.regroup()
        return self._take(everyone, [tokens], [logprobs])

    def _can_replay(self) -> bool:
        """Whether a CUDA graph can run the next steps."""
        return self._passes.can_capture() and all(s.is_plain for s in self._running)

    def _replay(self) -> list[SampledSequence]:
        """A few steps of all running sequences, before the host reads the tokens."""
        most = STEPS // 2 if self._waiting else STEPS  # a waiting sequence can enter sooner
        steps = min(most, max(s.limit - len(s.tokens) for s in self._running))
        rows = []
        for s in self._running:
            kind, done = s.request.sampling, len(s.tokens)
            uniforms = s.uniforms.until(done + steps)[done : done + steps]
            rows.append(Row(s.slot, s.tokens[-1], s.length - 1, uniforms, kind.temperature, kind.top_k, kind.top_p))
        sampled = self._passes.decode(rows, steps)
        if sampled is None:
            return self._pass([])
        self._replays += 1
        return self._take(list(self._running), *sampled)

    def _take(
        self, sequences: Sequence[SampledSequence], tokens: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
    ) -> list[SampledSequence]:
        """Give every sequence its sampled tokens, one list per step, and remove the sequences that end."""
        finished = []
        for i, sequence in enumerate(sequences):
            try:
                stop = None
                for token, logprob in zip(tokens, logprobs, strict=True):
                    if stop is None:  # tokens after the end are discarded
                        stop = self._take_token(sequence, token[i], logprob[i])
                if stop is None:
                    continue
                finished.append(sequence.end(stop, self._version))
                self._slots.release(sequence.slot, np.concatenate([sequence.prompt, sequence.tokens]))
            except Exception as why:  # its on_token failed, or its logits were not numbers: the others continue
                finished.append(sequence.end(why, self._version))
                # A NaN would spread, even when it is multiplied by 0. A GPU's steps write past a sequence's end.
                rows = sequence.length if self._device.type == "cpu" else self.max_length
                self._cache.clear(sequence.slot, rows)
                self._slots.release(sequence.slot, sequence.prompt[:1])
            sequence.slot = -1
        if finished:
            self._running = [s for s in self._running if s.slot >= 0]
            self._passes.regroup()
        return finished

    def _take_token(self, sequence: SampledSequence, token: int, logprob: float) -> StopReason | None:
        """Add one token. Returns the reason to stop after it, or None."""
        if logprob != logprob:  # NaN; checked first, so that none stays in the cache
            raise ValueError("the model's logits are not numbers: its weights are broken")
        if sequence.cancelled or self._closed:
            return StopReason.ABORTED
        return sequence.take(token, logprob, self._ends)


def _tuned_layers(model: Any) -> list[Any]:
    """Those that PEFT put adapters into, found without PEFT's classes, which take a second to import."""
    return [module for module in model.modules() if hasattr(module, "_active_adapter")]
