"""Supervised training on recorded interactions: every response in the exact state it was given in.

One example per response turn, packed by the same compiler: calls of one batch that begin alike share their rows. The
curriculum is short tasks first, then all of them: copying comes as a sudden step, and short tasks bring it on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from memopd.config import RunConfig, SftConfig
from memopd.optimise import checkpoint, ranks
from memopd.optimise.batch import MiniBatch, mini_batch
from memopd.optimise.diagnostics import dev_quality
from memopd.optimise.learner import adamw, export_model
from memopd.optimise.log import open_run
from memopd.optimise.models import PolicyRoot, load_causal_lm, prepare
from memopd.optimise.scoring import policy_scores
from memopd.optimise.source import Sampler
from memopd.optimise.update import clipped_step, learning_rate, set_learning_rate
from memopd.record import read_episodes
from memopd.record.rollout import codec_of
from memopd.tasks.grading import answers_of
from memopd.types import Episode

log = logging.getLogger("memopd")

DEV_EPISODES = 64  # of each dev store: enough for a loss


@dataclass(frozen=True, slots=True)
class Example:
    """An episode to imitate, with its number of questions (its horizon)."""

    episode: Episode
    k: int
    tokens: int  # that its calls read and sampled


def sft(config: RunConfig, output: Path, resume: bool = False) -> dict[str, float]:
    """Train until `sft.tokens` have been read, and return the last metrics. The model is in `output`/model."""
    device = ranks.start()
    run = open_run(output, config, resume)
    s = config.sft
    tokenizer = AutoTokenizer.from_pretrained(s.tokenizer or s.start, trust_remote_code=False)
    model = load_causal_lm(s.start, config.run.seed)
    root = prepare(PolicyRoot(model, config.model.attention), config.model, device, trained=True)
    optimiser = adamw(root, s.lr, config.optimise.weight_decay)
    tensors: dict[str, dict[str, torch.Tensor]] = {"student": dict(root.named_parameters())}
    tensors["student-optimiser"] = checkpoint.optimiser_tensors(optimiser, {p: n for n, p in root.named_parameters()})
    if run.checkpoint is not None:
        for name, into in tensors.items():
            checkpoint.load(run.checkpoint, name, into)
    examples = load_examples(s.episodes, s.keep, codec_of(tokenizer).decode)
    dev = load_examples(s.dev, (), codec_of(tokenizer).decode, DEV_EPISODES)
    sampler = Sampler(config, root, tokenizer) if config.run.dev_every and config.tasks.dev else None
    steps = s.tokens // s.batch
    log.info(f"{len(examples):,} episodes, {sum(e.tokens for e in examples):,} tokens; {steps:,} steps")

    metrics: dict[str, float] = {}
    for step in range(run.first, steps):
        with run.stage("compile"):
            chosen = choose(examples, s, step, steps, config.run.seed)
            batch = mini_batch([e.episode for e in chosen], config.optimise.budget)
        with run.stage("update"):
            set_learning_rate(optimiser, learning_rate(s.lr, step, steps, s.warmup, "cosine"))
            metrics = imitate(root, optimiser, batch, config.optimise.max_grad_norm)
        tokens, seconds = batch.tokens, sum(run.seconds.values())
        metrics |= {"tokens_per_second": tokens / seconds, "rows_saved": 1 - batch.rows / tokens}
        last = step + 1 == steps
        if dev and (last or (config.run.dev_every and (step + 1) % config.run.dev_every == 0)):
            with run.stage("dev"):
                metrics |= dev_loss(root, dev, config.optimise.budget)
                metrics |= {} if sampler is None else dev_quality(sampler, step + 1, tokenizer)
        run.metrics(step, metrics)
        if ranks.rank() == 0 and ("dev_loss" in metrics or step % 10 == 0):
            shown = [f"{k} {v:.3g}" for k, v in metrics.items() if k in SHOWN]
            log.info("  ".join([f"step {step + 1}/{steps}", *shown]))
        if (step + 1) % config.run.save_every == 0 or last:
            checkpoint.save(output, step + 1, tensors, {}, config.run.keep)
    if sampler is not None:
        sampler.close()
    export_model(output, root, tokenizer)
    ranks.stop()
    return metrics


SHOWN = ("loss", "dev_loss", "dev_em", "dev_f1", "tokens_per_second")


def imitate(root: PolicyRoot, optimiser: torch.optim.Optimizer, batch: MiniBatch, max_norm: float) -> dict[str, float]:
    """−mean log p of the recorded responses, over the global batch."""
    optimiser.zero_grad(set_to_none=True)
    D, loss_sum = len(batch), torch.zeros(1, dtype=torch.float64)
    for work, counts in ranks.deal(batch.work):
        logp, *_ = root(work.packed, 1.0)
        loss = -logp.sum()
        (loss / D * (ranks.world() if counts else 0.0)).backward()
        loss_sum += float(loss.detach()) * counts
    ranks.total(loss_sum)
    norm = clipped_step(root, optimiser, max_norm, float(loss_sum), "the")
    return {"loss": float(loss_sum) / D, "grad_norm": norm}


def load_examples(
    stores: Iterable[str], keep: Sequence[str], decode: Callable[..., str], limit: int | None = None
) -> list[Example]:
    """The paper's filter: `correct` keeps full marks, `valid` those whose every response closes its tags."""
    if unknown := set(keep) - {"correct", "valid"}:
        raise ValueError(f"sft.keep: {', '.join(unknown)}: choose from correct, valid")
    examples = []
    for store in stores:
        for n, episode in enumerate(read_episodes(store)):
            if limit is not None and n >= limit:
                break
            k = questions_in(episode, decode)
            if "correct" in keep and episode.reward < k:
                continue
            if "valid" in keep and not all(well_formed(decode(c.completion)) for c in episode.calls):
                continue
            tokens = sum(len(c.path) for c in episode.calls if c.trainable)
            examples.append(Example(episode, k, tokens))
    if stores and not examples:
        raise ValueError(f"{', '.join(stores)}: no episode is left after --keep {','.join(keep)}")
    return examples


def questions_in(episode: Episode, decode: Callable[..., str]) -> int:
    """k, from the answer that ended it: its parts; 1 where it never answered."""
    return len(answers_of(decode(episode.calls[-1].completion)) or (0,))


def well_formed(response: str) -> bool:
    tags = [response.count(t) for t in ("<think>", "</think>")]
    closed = [response.count(f"<{t}>") == response.count(f"</{t}>") for t in ("search", "answer")]
    acts = response.count("</search>") + response.count("</answer>")
    return tags == [1, 1] and all(closed) and acts == 1


def choose(examples: Sequence[Example], s: SftConfig, step: int, steps: int, seed: int) -> list[Example]:
    """A batch of about `sft.batch` tokens: a function of the seed and the step alone."""
    pool = examples
    if step < s.short * steps:
        pool = [e for e in examples if e.k <= s.short_k] or examples
    chosen, tokens = [], 0
    for i in _random_order(len(pool), seed, step):
        if tokens and tokens + pool[i].tokens > s.batch:
            break
        chosen.append(pool[i])
        tokens += pool[i].tokens
    return chosen


def _random_order(count: int, seed: int, step: int) -> Iterator[int]:
    rng = np.random.default_rng([seed, step])
    seen: set[int] = set()
    while len(seen) < count:
        i = int(rng.integers(count))
        if i not in seen:
            seen.add(i)
            yield i


def dev_loss(root: PolicyRoot, examples: Sequence[Example], budget: int) -> dict[str, float]:
    logp = policy_scores(root, mini_batch([e.episode for e in examples], budget), 1.0)
    return {"dev_loss": -float(logp.mean()), "dev_perplexity": math.exp(min(20.0, -float(logp.mean())))}
