"""Rollout context equivalence (RCE): compares packed logits with those of every call run alone, unpadded.

The tolerance is derived, never tuned. Rounding makes any two correct computations differ, and we measure by how much
on the reference itself: the error of the packed run, against a more precise run of the same calls, may be at most twice
the error of the calls run alone. (The difference that padding makes is no criterion: it is exactly 0 in half of all
small cases.)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.compile import Packed, fill
from memopd.models.attention import own_attention
from memopd.models.load import backbone
from memopd.models.support import sharing
from memopd.score import Head, call_states, decision_states, head_of, vocabulary_scores
from memopd.types import Call
from memopd.verify.distance import Measured, Progress, measure, silent
from memopd.verify.structure import structural_problems

BUDGET = 8192  # rows per pack

# The precision against which we measure the error of a run.
MORE_PRECISE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True, slots=True)
class EquivalenceReport:
    passed: bool
    attention: str
    dtype: str
    shared: bool  # False: the model cannot share rows and ran call by call
    calls: int
    decisions: int
    rows: int  # computed for the packs
    tokens: int  # computed if every call runs alone
    max_logit_error: float  # packed against alone
    max_logprob_error: float
    p99_logprob_error: float
    top1_agreement: float
    false_clip: float
    floor_max_logit_error: float  # alone against a right-padded batch: the effect of batching itself
    floor_p99_logprob_error: float
    logit_scale: float  # the largest |logit| of the reference
    error: float  # compared with the tolerance: packed against more precise, or against alone in float64
    tolerance: float
    tolerance_source: str
    worst_call: int
    worst_position: int  # of the sampled token within its completion
    problems: tuple[str, ...] = ()  # errors in the packs themselves
    # Results that were recorded earlier lack these.
    precise: str = ""  # the precision of the more precise run; empty if there is none, as in float64
    floor_top1_agreement: float | None = None
    own_p99_logprob_error: float | None = None  # alone against the more precise run
    own_top1_agreement: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def equivalence(
    model: Any,
    calls: Sequence[Call],
    attention: str = "auto",
    packs: Sequence[Packed] | None = None,
    budget: int = BUDGET,
    progress: Progress = silent,
) -> EquivalenceReport:
    """Check, for these calls and this model, that packing computes the same logits as the calls alone.

    Use `packs` to check packs that were made elsewhere, or broken on purpose.
    """
    calls = list(calls)
    packs = packs_of(calls, budget) if packs is None else packs
    with torch.no_grad():
        alone = alone_states(model, calls, progress)
        packed = packed_states(model, calls, progress("packed", packs), attention, like=alone)
        runs = {"packed": packed, "batched": batched_states(model, calls)}
        precise, tokens = precise_run(model, calls, progress), sampled_tokens(calls, alone.device)
        measured = measure(head_of(model), alone, runs, tokens, precise, progress=progress)
        return judge(model, calls, packs, measured, attention)


def judge(
    model: Any, calls: Sequence[Call], packs: Sequence[Packed], measured: Measured, attention: str
) -> EquivalenceReport:
    """The report on runs that were already made: `packed` and `batched` against the calls alone."""
    problems = structural_problems(packs, calls)
    dtype, scale = next(model.parameters()).dtype, measured.scale
    packed, floor = measured.runs["packed"].summary(), measured.runs["batched"].summary()
    own_p99 = own_top1 = None
    if measured.rounding is not None:
        apart = {name: distance.summary() for name, distance in measured.rounding.items()}
        error, own, rounding = apart["packed"].max_logit, apart["alone"].max_logit, torch.finfo(dtype).eps * scale
        own_p99, own_top1 = apart["alone"].p99_logprob, apart["alone"].top1
        tolerance = 2 * max(own, rounding)
        source = f"twice the calls' own error against {name_of(MORE_PRECISE[dtype])} ({own:.2e})"
        if own < rounding:
            source = f"twice one rounding of the largest logit ({rounding:.2e}); {source} would be less"
    else:
        error, (relative, why) = packed.max_logit, float64_tolerance(model)
        tolerance, source = relative * scale, f"{relative:.0e} of the largest logit, {why}"
    call, position = decision_index(calls)
    return EquivalenceReport(
        passed=not problems and error <= tolerance,  # False for NaN
        attention=attention,
        dtype=name_of(dtype),
        precise="" if measured.rounding is None else name_of(MORE_PRECISE[dtype]),
        shared=sharing(model).shared,
        calls=sum(c.trainable for c in calls),
        decisions=len(call),
        rows=sum(len(p) for p in packs),
        tokens=sum(len(c.path) for c in calls if c.trainable),
        max_logit_error=packed.max_logit,
        max_logprob_error=packed.max_logprob,
        p99_logprob_error=packed.p99_logprob,
        top1_agreement=packed.top1,
        false_clip=packed.false_clip,
        floor_max_logit_error=floor.max_logit,
        floor_p99_logprob_error=floor.p99_logprob,
        floor_top1_agreement=floor.top1,
        own_p99_logprob_error=own_p99,
        own_top1_agreement=own_top1,
        logit_scale=scale,
        error=error,
        tolerance=tolerance,
        tolerance_source=source,
        worst_call=int(call[packed.worst]),
        worst_position=int(position[packed.worst]),
        problems=tuple(problems),
    )


def float64_tolerance(model: Any) -> tuple[float, str]:
    """We have nothing more precise than float64 to compare with, so the bound is a multiple of its rounding."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return 1e-6, "the model's own softmax runs in float32"
    return 1e-12, "rounding in float64"


# ---- the ways to run the same calls; all return [D, H] in the order of the calls --------------------------------


def packs_of(calls: Sequence[Call], budget: int) -> list[Packed]:
    longest = max((len(c.path) for c in calls if c.trainable), default=0)
    return fill(calls, max(budget, longest))


def packed_states(model: Any, calls: Sequence[Call], packs: Iterable[Packed], attention: str, like: Tensor) -> Tensor:
    """The packed states, scattered by (call, k) into the shape of `like`. A missing or misplaced decision stays NaN."""
    return scattered(calls, packs, lambda packed: decision_states(model, packed, attention), like)


def scattered(
    calls: Sequence[Call], packs: Iterable[Packed], states_of: Callable[[Packed], Tensor], like: Tensor
) -> Tensor:
    """The states of these packs in the order of the calls. A decision that is in none of them is NaN."""
    start = np.cumsum([0] + [len(c.completion) if c.trainable else 0 for c in calls])
    states = torch.full_like(like, float("nan"))
    for packed in packs:
        call, row = packed.decisions.call, packed.decisions.row
        if not len(call) or row.max() >= len(packed) or call.max() >= len(calls):
            continue
        here = states_of(packed)
        k = np.arange(len(call)) - np.searchsorted(call, call)  # the number of earlier decisions of the same call
        slot = torch.as_tensor(np.minimum(start[call] + k, start[call + 1] - 1), device=here.device)
        states.index_copy_(0, slot, here.to(like.dtype))
    return states


def alone_states(model: Any, calls: Sequence[Call], progress: Progress = silent, stage: str = "calls alone") -> Tensor:
    """The reference: each call by itself, unpadded, with transformers' own attention."""
    kept = [c for c in calls if c.trainable]
    with own_attention(model):
        return torch.cat([call_states(model, c.path, len(c.prompt) - 1) for c in progress(stage, kept)])


def precise_run(model: Any, calls: Sequence[Call], progress: Progress = silent) -> tuple[Head, Tensor] | None:
    """The calls alone at a higher precision, and the head for their states. None if there is no higher precision."""
    dtype = next(model.parameters()).dtype
    if dtype not in MORE_PRECISE:
        return None
    precise = MORE_PRECISE[dtype]
    reference = at_precision(model, precise)  # as large as the model, or larger: only its head outlives this function
    head = head_of(reference)
    return head, alone_states(reference, calls, progress, f"calls alone, {name_of(precise)}")


def batched_states(model: Any, calls: Sequence[Call], batch: int = 8) -> Tensor:
    """The batching floor: the same calls in a batch, padded on the right, where causality hides the padding."""
    device = next(model.parameters()).device
    kept = [c for c in calls if c.trainable]
    states = []
    with own_attention(model):
        for at in range(0, len(kept), batch):
            part = kept[at : at + batch]
            ids = torch.zeros(len(part), max(len(c.path) for c in part), dtype=torch.long, device=device)
            for row, c in zip(ids, part, strict=True):
                row[: len(c.path)] = torch.as_tensor(c.path)
            hidden = backbone(model)(input_ids=ids, use_cache=False).last_hidden_state
            states += [h[len(c.prompt) - 1 : len(c.path)] for h, c in zip(hidden, part, strict=True)]
    return torch.cat(states)


def sampled_tokens(calls: Sequence[Call], device: torch.device) -> Tensor:
    return torch.as_tensor(np.concatenate([c.completion for c in calls if c.trainable]), device=device).long()


def decision_index(calls: Sequence[Call]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """For every decision: its call, and its place in the completion."""
    call = np.repeat(np.arange(len(calls)), [len(c.completion) if c.trainable else 0 for c in calls])
    return call, np.concatenate([np.arange(len(c.completion)) for c in calls if c.trainable])


def at_precision(model: Any, dtype: torch.dtype) -> Any:
    """A copy of the model at another precision."""
    reference = copy.deepcopy(model).to(dtype)
    reference.zero_grad(set_to_none=True)
    if reference._can_set_experts_implementation():
        reference.set_experts_implementation("eager")  # the grouped kernels do not support float64
    return reference


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- gradients --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GradientReport:
    passed: bool
    attention: str
    dtype: str
    difference: float  # ‖packed − alone‖ / ‖alone‖ over all parameters
    reordering: float  # ‖alone, last call first − alone‖ / ‖alone‖: the effect of the order of the calls
    error: float  # compared with the tolerance
    tolerance: float
    tolerance_source: str
    worst_parameter: str
    batching: float = float("nan")  # ‖padded batch − alone‖ / ‖alone‖: the effect of matrix products of another shape
    problems: tuple[str, ...] = ()  # parameters that have a gradient in only one of the two runs


def gradient_equivalence(
    model: Any, calls: Sequence[Call], attention: str = "auto", budget: int = BUDGET
) -> GradientReport:
    """Compares the gradient of the mean log p of the sampled tokens, packed, with that of every call alone.

    Drops the gradients that the model holds.
    """
    dtype = next(model.parameters()).dtype
    packs = packs_of(calls, budget)
    packed = _packed_gradients(model, calls, packs, attention)
    alone = _alone_gradients(model, calls)
    reordered = _alone_gradients(model, calls[::-1])
    batched = _batched_gradients(model, calls)
    apart = {n: _distance(packed, alone, n) / (_square(alone, n) + 1e-30) for n in packed | alone}
    problems = [f"{n}: has a gradient only when packed" for n in packed if n not in alone]
    problems += [f"{n}: has no gradient when packed" for n in alone if n not in packed]
    change = _relative(packed, alone)
    if dtype in MORE_PRECISE:
        precise = MORE_PRECISE[dtype]
        exact = _alone_gradients(at_precision(model, precise), calls)
        error, own = _relative(packed, exact), max(_relative(alone, exact), torch.finfo(dtype).eps)
        tolerance, source = 2 * own, f"twice the calls' own error against {name_of(precise)} ({own:.2e})"
    else:
        error, tolerance, source = change, 1e-6, "norms and rotary angles run in float32"
    return GradientReport(
        passed=not problems and error <= tolerance,
        attention=attention,
        dtype=name_of(dtype),
        difference=change,
        reordering=_relative(reordered, alone),
        batching=_relative(batched, alone),
        error=error,
        tolerance=tolerance,
        tolerance_source=source,
        worst_parameter=max(apart, key=apart.__getitem__),
        problems=tuple(problems),
    )


Gradients = dict[str, Tensor]


def _packed_gradients(model: Any, calls: Sequence[Call], packs: Sequence[Packed], attention: str) -> Gradients:
    model.zero_grad(set_to_none=True)
    for packed in packs:
        states = decision_states(model, packed, attention)
        tokens = torch.as_tensor(packed.decisions.token, device=states.device).long()
        _backward(model, states, tokens, calls)
    return _take_gradients(model)


def _alone_gradients(model: Any, calls: Sequence[Call]) -> Gradients:
    model.zero_grad(set_to_none=True)
    with own_attention(model):
        for call in calls:
            if call.trainable:
                states = call_states(model, call.path, len(call.prompt) - 1)
                _backward(model, states, sampled_tokens([call], states.device), calls)
    return _take_gradients(model)


def _batched_gradients(model: Any, calls: Sequence[Call]) -> Gradients:
    model.zero_grad(set_to_none=True)
    with own_attention(model):  # also around the backward pass, which runs checkpointed layers again
        states = batched_states(model, calls)
        _backward(model, states, sampled_tokens(calls, states.device), calls)
    return _take_gradients(model)


def _backward(model: Any, states: Tensor, tokens: Tensor, calls: Sequence[Call]) -> None:
    total = sum(len(c.completion) for c in calls if c.trainable)
    (-vocabulary_scores(head_of(model), states, tokens).logprob.sum() / total).backward()


def _take_gradients(model: Any) -> Gradients:
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def _relative(a: Gradients, b: Gradients) -> float:
    return float((sum(_distance(a, b, n) for n in a | b) / sum(_square(b, n) for n in b)) ** 0.5)


def _distance(a: Gradients, b: Gradients, name: str) -> float:
    """‖a − b‖² of one parameter. A gradient that one of them lacks counts as zero."""
    if name not in a or name not in b:
        return _square(a if name in a else b, name)
    return float((a[name].double() - b[name].double()).square().sum())


def _square(gradients: Gradients, name: str) -> float:
    return float(gradients[name].double().square().sum()) if name in gradients else 0.0
