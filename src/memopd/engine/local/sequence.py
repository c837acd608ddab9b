"""A request in the local engine, from its submission to its end, and the row that all of them make in a pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from memopd.engine.guide import Guide
from memopd.engine.local.attention import Span
from memopd.engine.local.sampler import Uniforms, draw, likeliest
from memopd.engine.protocol import Completion, Likeliest, Request
from memopd.engine.stops import FOUND, Stops
from memopd.types import Ids, StopReason

if TYPE_CHECKING:
    from memopd.engine.local.session import LocalSession


@dataclass(slots=True, eq=False)
class SampledSequence:
    request: Request
    prompt: Ids
    limit: int  # the most tokens to sample
    stops: Stops | None
    guide: Guide | None = None
    on_token: Callable[[int], None] | None = None
    session: LocalSession | None = None  # that gets the completion; None: somebody waits for the future
    future: Future[Completion] = field(default_factory=Future)
    uniforms: Uniforms = field(init=False)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Likeliest] = field(default_factory=list)
    stop_state: int = 0  # of `stops`, after the tokens so far
    slot: int = -1
    cancelled: bool = False
    outcome: Completion | BaseException | None = None  # what the future will get

    def __post_init__(self) -> None:
        self.uniforms = Uniforms(int(self.request.seed))

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def is_plain(self) -> bool:
        """Whether its tokens can be sampled without the host: no grammar, no list of likeliest tokens."""
        return self.guide is None and not self.request.top_logprobs

    @property
    def is_awaited(self) -> bool:
        session = self.session  # read once: another thread may close it
        return session is None or session.waits or session.ahead

    def take(self, token: int, logprob: float, ends: frozenset[int]) -> StopReason | None:
        """Add a sampled token. Returns the reason to stop after it, or None."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.on_token is not None:
            self.on_token(token)
        if self.stops is not None:
            self.stop_state = self.stops.after(self.stop_state, token)
        if self.guide is not None:
            self.guide.take(token)
        if token in ends or self.stop_state == FOUND:
            return StopReason.STOP
        return StopReason.LENGTH if len(self.tokens) >= self.limit else None

    def end(self, outcome: StopReason | BaseException, version: int) -> SampledSequence:
        """Set the outcome. The engine delivers it later; until then its session no longer waits."""
        if isinstance(outcome, StopReason):
            tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float64)
            self.outcome = Completion(tokens, logprobs, outcome, version, tuple(self.top))
        else:
            self.outcome = outcome
        if session := self.session:  # read once: another thread may close it
            session.waits = False
        return self

    def deliver(self) -> None:
        if isinstance(self.outcome, BaseException):
            self.future.set_exception(self.outcome)
        else:
            assert self.outcome is not None
            self.future.set_result(self.outcome)


@dataclass(frozen=True, slots=True, eq=False)
class FlatRow:
    """The inputs of a pass: the last token of every running sequence, then the new tokens of the prompts that enter."""

    ids: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]  # in the cache
    last: np.ndarray[Any, Any]  # of each sequence, whose logits are needed
    running: list[Span]
    entering: list[Span]

    @classmethod
    def of(
        cls, running: Sequence[SampledSequence], entering: Sequence[tuple[SampledSequence, int]], max_length: int
    ) -> FlatRow:
        """`entering`: each sequence with the number of prompt tokens that its slot holds already."""
        ids = [np.array([s.tokens[-1] for s in running], np.int64)]
        positions = [np.array([s.length - 1 for s in running], np.int64)]
        places = [np.array([s.slot for s in running], np.int64) * max_length + positions[0]]
        last, at = list(range(len(running))), len(running)
        prompts = []
        for sequence, shared in entering:
            new = np.arange(shared, len(sequence.prompt))
            prompts.append(Span(sequence.slot, at, len(new), shared))
            ids.append(sequence.prompt[shared:].astype(np.int64))
            positions.append(new)
            places.append(new + sequence.slot * max_length)
            at += len(new)
            last.append(at - 1)
        spans = [Span(s.slot, i, 1, s.length - 1) for i, s in enumerate(running)]
        joined = np.concatenate(ids), np.concatenate(positions), np.concatenate(places)
        return cls(*joined, np.array(last), spans, prompts)


def read_request(
    request: Request,
    max_length: int,
    vocabulary: int,
    stops_of: Callable[[tuple[str, ...]], Stops] | None,
    guide_of: Callable[[str], Guide] | None = None,
) -> SampledSequence:
    """Check a request. Errors name its episode."""
    name = f"episode {request.episode!r}: " if request.episode else ""
    prompt = np.asarray(request.prompt)
    if prompt.ndim != 1 or not len(prompt) or prompt.dtype.kind not in "iu":
        raise ValueError(f"{name}a prompt must be one flat list of token ids, not empty")
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        wrong = prompt.min() if prompt.min() < 0 else prompt.max()
        raise ValueError(f"{name}token id {wrong} is outside this model's vocabulary of {vocabulary}")
    room = max_length - len(prompt)
    if room < 1:
        raise ValueError(
            f"{name}a prompt of {len(prompt)} tokens leaves no room in max_length={max_length}: shorten the "
            "context or give the engine a larger max_length"
        )
    stops = None
    if request.stop:
        if stops_of is None:
            raise ValueError(f"{name}stop strings need a tokenizer: give the engine one")
        stops = stops_of(tuple(request.stop))
    guide = None
    if request.grammar:
        if guide_of is None:
            raise ValueError(f"{name}a grammar needs a tokenizer: give the engine one")
        guide = guide_of(request.grammar)
    limit = room if request.sampling.max_tokens is None else min(room, request.sampling.max_tokens)
    return SampledSequence(request, prompt.astype(np.int32), limit, stops, guide)


def draw_tokens(sequences: Sequence[SampledSequence], logits: Tensor) -> tuple[list[int], list[float]]:
    """The next token of each sequence, from its own distribution and its own draw."""

    def tensor(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.array(values)).to(logits.device)

    guided = [(i, s.guide.allowed()) for i, s in enumerate(sequences) if s.guide is not None]
    if guided:
        refused = torch.from_numpy(~np.stack([allowed for _, allowed in guided])).to(logits.device)
        rows = torch.tensor([i for i, _ in guided], device=logits.device)
        logits = logits.index_copy(0, rows, logits[rows].masked_fill(refused, -torch.inf))
    kinds = [s.request.sampling for s in sequences]
    cut: list[Tensor] = []
    if any(k.top_k or k.top_p < 1 for k in kinds):
        cut = [tensor([k.top_k or logits.shape[-1] for k in kinds]), tensor([k.top_p for k in kinds])]
    temperature = tensor([k.temperature for k in kinds])
    uniform = tensor([s.uniforms.until(len(s.tokens) + 1)[len(s.tokens)] for s in sequences])
    token, logprob = draw(logits, uniform, temperature, *cut)
    if count := max(s.request.top_logprobs for s in sequences):
        for s, row in zip(sequences, likeliest(logits, count, temperature, *cut), strict=True):
            if s.request.top_logprobs:
                s.top.append(tuple(row[: s.request.top_logprobs]))
    return token.tolist(), logprob.tolist()


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a completion: those of the model and of the tokenizer."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = [*(ends if isinstance(ends, list | tuple) else [ends]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(i for i in found if i is not None)
