"""The curves of a run, their descriptions, and their points, few enough for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memopd.evaluate import over_tasks

POINTS = 400  # per curve


@dataclass(frozen=True, slots=True)
class Chart:
    key: str  # of metrics.jsonl
    title: str
    description: str  # for readers who have never trained a policy


GROUPS: dict[str, tuple[Chart, ...]] = {
    "Does it learn?": (
        Chart("reward", "Reward", "The mean reward of the sampled episodes, which training maximises."),
        Chart("em", "Exact match, training", "Answers equal to a reference answer, summed over a task's questions."),
        Chart("f1", "F1, training", "Word overlap with the reference answers, summed over a task's questions."),
        Chart("dev_em", "Exact match, dev", "The same on questions that are never trained on."),
        Chart("dev_f1", "F1, dev", "The same on questions that are never trained on."),
        Chart("loss", "Loss", "Mean −log p of the imitated tokens."),
        Chart("dev_loss", "Loss, dev", "Mean −log p of imitated tokens that are never trained on."),
        Chart("dev_perplexity", "Perplexity, dev", "exp of the dev loss: how many tokens the model is torn between."),
    ),
    "How far is the policy from the teacher?": (
        Chart("loss_opd", "Divergence from the teacher", "Mean of teacher.divergence over the taught tokens."),
        Chart("teacher_kl_think", "… where the agent thinks", "The same over the <think> part of the responses."),
        Chart("teacher_kl_action", "… where it acts", "The same over the search or answer after it."),
    ),
    "How far does the policy move?": (
        Chart("approx_kl", "KL to the sampling policy", "How far the updates of one step moved the policy."),
        Chart("clip_fraction", "Clip fraction", "Share of tokens whose ratio was clipped: they give no gradient."),
        Chart("reference_kl", "Drift from the start", "Mean log p now − log p at the start, an estimate of a KL."),
        Chart("entropy", "Entropy", "How undecided the policy is at a token. At 0 it has no choice."),
        Chart("grad_norm", "Gradient norm, policy", "Before clipping. Look at the step of a sudden peak."),
        Chart("loss_ppo", "Policy loss", "The algorithm's loss. Its value means little; a jump is a warning."),
        Chart("lr", "Learning rate", "The policy's learning rate."),
    ),
    "Critic and advantages": (
        Chart("explained_variance", "Explained variance", "1: the critic predicts the returns; 0: only their mean."),
        Chart("loss_value", "Critic's loss", "Squared error of the returns, clipped."),
        Chart("advantage_std", "Spread of advantages", "Before whitening. It is 0 if all rewards are equal."),
        Chart("critic_grad_norm", "Gradient norm, critic", "Before clipping."),
    ),
    "Is it scored as it was sampled?": (
        Chart("sampler_gap", "Gap to the sampler", "Mean |Δ log p| between sampler and trainer for the same token."),
        Chart("sampler_gap_p99", "Gap to the sampler, p99", "99 of 100 tokens have a smaller gap."),
        Chart("staleness", "Staleness", "Updates between the policy that sampled a call and the one that it trains."),
        Chart("staleness_max", "Staleness, largest", "Of all calls of the step. It is at most sampling.ahead."),
        Chart("importance_weight", "Importance weight", "Mean of p now / p when sampled, truncated. 1: no drift."),
        Chart("truncated", "Truncated weights", "Share of tokens whose importance weight was cut to its upper limit."),
        Chart("sampled_again", "Sampled again", "Episodes that were lost with a killed run, and sampled again."),
        Chart("first_ratio_error", "First ratio's error", "max |ratio − 1| before the first update: it must be ~0."),
    ),
    "What does it cost?": (
        Chart("calls_per_episode", "Calls per episode", "Model calls until the answer."),
        Chart("response_tokens", "Tokens per call", "The mean number of tokens that a call samples."),
        Chart("rows_saved", "Rows saved by sharing", "Share of the tokens that shared prefixes save."),
        Chart("tokens_per_second", "Tokens per second", "Of all calls, over the whole step with its sampling."),
        Chart("left_out", "Episodes left out", "Episodes with a call that did not fit the budget."),
    ),
}  # fmt: skip
NOT_SHOWN = {"step", "episodes"}
ENDS = ("reward", "em", "f1", "dev_em", "dev_f1", "loss", "dev_loss")


def groups(metrics: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Charts that at least one run has numbers for. Metrics without a description come last, under their own name."""
    present = {key for lines in metrics for key in _keys(lines)}
    known = {chart.key for charts in GROUPS.values() for chart in charts}
    found = {name: [c for c in charts if c.key in present] for name, charts in GROUPS.items()}
    found["Other"] = [Chart(key, key, "") for key in sorted(present - known)]
    return [
        {"title": name, "charts": [{"key": c.key, "title": c.title, "description": c.description} for c in charts]}
        for name, charts in found.items()
        if charts
    ]


def series(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every curve of a run. Longer curves than `POINTS` are averaged over neighbours, at the last of their steps."""
    width = max(1, math.ceil(len(lines) / POINTS))
    bins = [lines[at : at + width] for at in range(0, len(lines), width)]
    return {
        "steps": [b[-1]["step"] + 1 for b in bins],
        "width": width,
        "values": {key: [_mean([line.get(key) for line in b]) for b in bins] for key in sorted(_keys(lines))},
    }


def _keys(lines: Sequence[dict[str, Any]]) -> set[str]:
    """The metrics of a run, without a drift that is always 0 because the run did not score the reference policy."""
    omitted = NOT_SHOWN if any(line.get("reference_kl") for line in lines) else {*NOT_SHOWN, "reference_kl"}
    return {key for line in lines for key in line if not key.startswith("seconds_")} - omitted


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def ends(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The means of the first and last tenth of the steps (at least five); for dev, the first and last evaluation."""
    found = []
    for key in ENDS:
        known = [(line["step"] + 1, line[key]) for line in lines if line.get(key) is not None]
        if len(known) < 2:
            continue
        n = 1 if key.startswith("dev_") else max(min(5, len(known) // 2), len(known) // 10)
        parts = [known[:n], known[-n:]]
        found.append({"key": key, "ends": [_end(part) for part in parts]})
    return found


def _end(part: list[tuple[int, float]]) -> dict[str, Any]:
    estimate = over_tasks([value for _, value in part])
    return {"steps": [part[0][0], part[-1][0]], "mean": estimate.mean, "spread": estimate.spread}


def stages(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The seconds of every stage over the whole run."""
    total: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("seconds_") and value is not None:
                total[key.removeprefix("seconds_")] = total.get(key.removeprefix("seconds_"), 0.0) + value
    return total
