"""How far several ways of scoring the same sampled tokens are from the calls alone, decision by decision."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopd.score import Head

CLIP = 0.2  # PPO's ε, for false clipping
CHUNK = 256  # decisions whose logits are held at once

Progress = Callable[[str, Sequence[Any]], Iterable[Any]]  # names a stage, and shows how far it is with its items


def silent(_: str, items: Sequence[Any]) -> Iterable[Any]:
    return items


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one way of scoring the sampled tokens is from another."""

    max_logit: float  # max |Δlogit| over the full vocabulary
    max_logprob: float  # max |Δlog p| of the sampled tokens
    p99_logprob: float
    top1: float  # share of decisions with the same first choice
    false_clip: float  # share of unchanged-policy ratios outside [1 - ε, 1 + ε]
    worst: int  # the decision with the largest |Δlogit|


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one run is from another, for every decision."""

    logit: Tensor  # [D] max |Δlogit| over the full vocabulary
    logprob: Tensor  # [D] Δlog p of the sampled token, at temperature 1
    sampled_logprob: Tensor  # [D] the same at the temperature of its episode
    same: Tensor  # [D] bool: the first choice is the same
    kl: Tensor | None = None  # [D] KL(alone ‖ run) at the temperature of its episode, where it was asked for

    def summary(self) -> Difference:
        return difference(self.logit, self.logprob, self.same)

    def as_sampled(self, which: Tensor | None = None) -> Difference:
        """The summary at the sampling temperatures, of all decisions or of those in a mask."""
        logit, delta, same = self.logit, self.sampled_logprob, self.same
        return difference(logit, delta, same) if which is None else difference(logit[which], delta[which], same[which])


@dataclass(frozen=True, slots=True)
class Measured:
    runs: dict[str, Distance]  # from the calls alone
    logprob: Tensor  # [D] log p of the sampled tokens, calls alone, at the sampling temperatures
    scale: float  # the largest |logit| of the calls alone
    rounding: dict[str, Distance] | None  # `alone`, `packed` and `batched` from the more precise run, if there is one


@dataclass(frozen=True, slots=True)
class _Scores:
    """A chunk of decisions in one run."""

    logits: Tensor  # [d, V]
    first: Tensor  # [d]
    plain: Tensor  # [d] log p of the sampled token at temperature 1
    sampled: Tensor  # [d] at the sampling temperature
    log: Tensor | None  # [d, V] the whole distribution at the sampling temperature, if it is needed


@torch.no_grad()
def measure(
    head: Head,
    alone: Tensor,  # [D, H]
    runs: Mapping[str, Tensor],  # [D, H] each
    tokens: Tensor,  # [D]
    precise: tuple[Head, Tensor] | None,
    temperature: Tensor | None = None,  # [D]; 1 if omitted
    progress: Progress = silent,
    divergent: Collection[str] = (),  # the runs whose KL divergence is wanted
) -> Measured:
    """Compare all runs with the calls alone. Every row of logits is computed once, a chunk of decisions at a time.

    A state that is the same as in the call alone has the same logits, so it does not go through the vocabulary again,
    and neither do the states of a chunk that another run had as well.
    """
    columns: dict[str, list[Distance]] = {name: [] for name in runs}
    rounding: dict[str, list[Distance]] = {n: [] for n in ("alone", "packed", "batched") if n == "alone" or n in runs}
    logprobs, scale = [], 0.0
    for at in progress("vocabulary", range(0, len(tokens), CHUNK)):
        part = slice(at, at + CHUNK)
        token, T = tokens[part, None], None if temperature is None else temperature[part, None]
        own = _scores(head, alone[part], token, T, whole=bool(divergent))
        exact = None if precise is None else _scores(precise[0], precise[1][part], token, T)
        scale = max(scale, float(own.logits.abs().max()))
        logprobs.append(own.sampled)
        if exact is not None:
            rounding["alone"].append(_distance(own, exact))
        known: list[tuple[Tensor, Distance]] = []
        for name, states in runs.items():
            here, kl, mine = states[part], name in divergent, None
            again = next((made for other, made in known if torch.equal(here, other)), None)
            if again is not None and not kl and name not in rounding:
                columns[name].append(again)
                continue
            new = torch.nonzero((here != alone[part]).any(-1))[:, 0]
            if len(new):
                mine = _scores(head, here[new], token[new], None if T is None else T[new], kl)
            columns[name].append(_filled(mine, own, new, _zero(own, kl)))
            if not kl:
                known.append((here, columns[name][-1]))
            if exact is not None and name in rounding:
                rounding[name].append(_filled(mine, exact, new, rounding["alone"][-1]))
    made = {name: _joined(parts) for name, parts in columns.items()}
    rounded = None if precise is None else {name: _joined(parts) for name, parts in rounding.items()}
    return Measured(made, torch.cat(logprobs), scale, rounded)


def _scores(head: Head, states: Tensor, token: Tensor, temperature: Tensor | None, whole: bool = False) -> _Scores:
    logits = head.logits(states).double()
    log = logits.log_softmax(-1)
    plain = sampled = log.gather(-1, token)[:, 0]
    if temperature is not None and bool((temperature != 1).any()):
        log = (logits / temperature).log_softmax(-1)
        sampled = log.gather(-1, token)[:, 0]
    return _Scores(logits, logits.argmax(-1), plain, sampled, log if whole else None)


def _distance(run: _Scores, reference: _Scores) -> Distance:
    kl = None
    if run.log is not None and reference.log is not None:
        kl = (reference.log.exp() * (reference.log - run.log)).sum(-1)
    return Distance(
        (run.logits - reference.logits).abs().amax(-1),
        run.plain - reference.plain,
        run.sampled - reference.sampled,
        run.first == reference.first,
        kl,
    )


def _filled(run: _Scores | None, reference: _Scores, new: Tensor, others: Distance) -> Distance:
    """The distance of a chunk: computed for the decisions in `new`, and for the rest that of the calls alone."""
    if run is None:
        return others
    log = None if reference.log is None else reference.log[new]
    part = _Scores(reference.logits[new], reference.first[new], reference.plain[new], reference.sampled[new], log)
    made = _distance(run, part)
    columns = zip(_columns(others), _columns(made), strict=True)
    return Distance(*(rest.index_copy(0, new, column) for rest, column in columns))


def _zero(own: _Scores, kl: bool) -> Distance:
    zero = torch.zeros_like(own.plain)
    return Distance(zero, zero, zero, torch.ones_like(zero, dtype=torch.bool), zero if kl else None)


def _columns(distance: Distance) -> list[Tensor]:
    columns = (distance.logit, distance.logprob, distance.sampled_logprob, distance.same, distance.kl)
    return [column for column in columns if column is not None]


def _joined(parts: Sequence[Distance]) -> Distance:
    return Distance(*(torch.cat(column) for column in zip(*map(_columns, parts), strict=True)))


def difference(logit: Tensor, delta: Tensor, same: Tensor) -> Difference:
    """Summarises, per decision, max |Δlogit|, Δlog p and whether the first choice is the same."""
    ratio = delta.exp()
    return Difference(
        max_logit=float(logit.max()),
        max_logprob=float(delta.abs().max()),
        p99_logprob=p99(delta.abs()),
        top1=float(same.double().mean()),
        false_clip=float(((ratio < 1 - CLIP) | (ratio > 1 + CLIP)).double().mean()),
        worst=int(logit.argmax()),
    )


def p99(values: Tensor) -> float:
    return float(np.quantile(values.cpu().numpy(), 0.99))  # torch.quantile takes at most 2^24 values
