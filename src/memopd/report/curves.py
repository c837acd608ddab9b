"""Which curves a run has, what each of them says, and few enough points of it for a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memopd.evaluate import over_tasks

POINTS = 400  # a curve


@dataclass(frozen=True, slots=True)
class Chart:
    key: str  # of metrics.jsonl
    title: str
    says: str  # to somebody who has never trained a policy


GROUPS: dict[str, tuple[Chart, ...]] = {
    "Does it learn?": (
        Chart("reward", "Reward", "What the sampled episodes earned, on average. This is what PPO raises."),
        Chart("em", "Exact match, training", "Answers equal to a reference answer, summed over a task's questions."),
        Chart("f1", "F1, training", "Word overlap with the reference answers, summed over a task's questions."),
        Chart("dev_em", "Exact match, dev", "The same on questions that are never trained on."),
        Chart("dev_f1", "F1, dev", "The same on questions that are never trained on."),
        Chart("loss", "Loss", "Mean −log p of the imitated tokens."),
        Chart("dev_loss", "Loss, dev", "Mean −log p of imitated tokens that are never trained on."),
        Chart("dev_perplexity", "Perplexity, dev", "exp of the dev loss: between how many tokens the model wavers."),
    ),
    "What does the teacher say?": (
        Chart("loss_opd", "Divergence from the teacher", "Mean KL(policy ‖ teacher) over the taught tokens."),
        Chart("teacher_kl_think", "… where the agent thinks", "The same KL over the <think> part of the responses."),
        Chart("teacher_kl_action", "… where it acts", "The same KL over the search or the answer behind it."),
    ),
    "How far does the policy move?": (
        Chart("approx_kl", "KL to the sampling policy", "How far the updates of one step moved the policy."),
        Chart("clip_fraction", "Clip fraction", "Tokens whose ratio left PPO's trust region: no gradient from these."),
        Chart("reference_kl", "Drift from the start", "Mean log p now − log p at the start: estimates a KL."),
        Chart("entropy", "Entropy", "How undecided the policy is at a token. Near 0: it always says the same."),
        Chart("grad_norm", "Gradient norm, policy", "Before clipping. Sudden peaks: look at the step."),
        Chart("loss_ppo", "PPO loss", "The clipped surrogate. Its size says little, a jump says something."),
        Chart("lr", "Learning rate", "Of the policy."),
    ),
    "Critic and advantages": (
        Chart("explained_variance", "Explained variance", "1: the critic foresees the returns; 0: only their mean."),
        Chart("loss_value", "Critic's loss", "Squared error of the returns, clipped."),
        Chart("advantage_std", "Spread of advantages", "Before whitening. 0: all episodes earned the same."),
        Chart("critic_grad_norm", "Gradient norm, critic", "Before clipping."),
    ),
    "Is it scored as it was sampled?": (
        Chart("sampler_gap", "Gap to the sampler", "Mean |Δ log p| between sampler and trainer for the same token."),
        Chart("sampler_gap_p99", "Gap to the sampler, p99", "99 of 100 tokens are closer than this."),
        Chart("first_ratio_error", "First ratio's error", "max |ratio − 1| before anything was updated: must be ~0."),
    ),
    "What does it cost?": (
        Chart("calls_per_episode", "Calls an episode", "Model calls until the answer."),
        Chart("response_tokens", "Tokens a call", "Sampled by one call, on average."),
        Chart("rows_saved", "Rows saved by sharing", "Share of the tokens that equal prefixes did not compute again."),
        Chart("tokens_per_second", "Tokens a second", "Of all calls, over the whole step, sampling included."),
        Chart("left_out", "Episodes left out", "A call did not fit the budget: the whole episode stays out."),
    ),
}  # fmt: skip
SILENT = {"step", "episodes"}
ENDS = ("reward", "em", "f1", "dev_em", "dev_f1", "loss", "dev_loss")


def groups(metrics: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Charts that at least one run has numbers for; what nobody described here comes last, under its own name."""
    there = {key for lines in metrics for key in _keys(lines)}
    known = {chart.key for charts in GROUPS.values() for chart in charts}
    found = {name: [c for c in charts if c.key in there] for name, charts in GROUPS.items()}
    found["Other"] = [Chart(key, key, "") for key in sorted(there - known)]
    return [
        {"title": name, "charts": [{"key": c.key, "title": c.title, "says": c.says} for c in charts]}
        for name, charts in found.items()
        if charts
    ]


def series(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every curve of a run. Of more steps than `POINTS`, neighbours become their mean, at the last of their steps."""
    width = max(1, math.ceil(len(lines) / POINTS))
    bins = [lines[at : at + width] for at in range(0, len(lines), width)]
    return {
        "steps": [b[-1]["step"] + 1 for b in bins],
        "width": width,
        "values": {key: [_mean([line.get(key) for line in b]) for b in bins] for key in sorted(_keys(lines))},
    }


def _keys(lines: Sequence[dict[str, Any]]) -> set[str]:
    """A run that did not score the reference policy has a drift of 0 throughout, and did not measure it."""
    silent = SILENT if any(line.get("reference_kl") for line in lines) else {*SILENT, "reference_kl"}
    return {key for line in lines for key in line if not key.startswith("seconds_")} - silent


def _mean(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def ends(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How it began and how it ended: the first and last tenth of the steps, at least five; of dev one evaluation."""
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
    """Seconds of every stage over the whole run."""
    total: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith("seconds_") and value is not None:
                total[key.removeprefix("seconds_")] = total.get(key.removeprefix("seconds_"), 0.0) + value
    return total
