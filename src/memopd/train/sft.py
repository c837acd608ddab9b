"""Supervised training on recorded interactions: every response in the exact state in which it was given.

There is one example per response turn, packed by the same compiler, so that calls of a batch with a common prefix share
its rows. The curriculum is short tasks first, then all tasks: models learn to copy in a sudden step, and short tasks
make it come earlier.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from memopd.agent.codec import codec_of
from memopd.agent.parts import check_parts
from memopd.attention import check_attention
from memopd.config import RunConfig, SftConfig
from memopd.models.load import load_causal_lm, load_tokenizer
from memopd.record import read_episodes
from memopd.tasks.grading import answers_of
from memopd.train import checkpoint, ranks
from memopd.train.batch import MiniBatch, mini_batch, path_length
from memopd.train.diagnostics import dev_quality, log_step, warn_left_out
from memopd.train.engines import check_positions
from memopd.train.learner import adamw, export_policy, trained_tensors
from memopd.train.log import open_run
from memopd.train.models import PolicyRoot, master_dtype, prepare
from memopd.train.roots import check_adapters, student_over_base
from memopd.train.scoring import policy_scores
from memopd.train.source import Sampler, check_sources
from memopd.train.update import backward, clipped_step, learning_rate, set_learning_rate
from memopd.types import Episode, Ids

log = logging.getLogger("memopd")

DEV_EPISODES = 64  # of each dev store: enough for a loss
WARMUP = 0.02  # share of the steps


@dataclass(frozen=True, slots=True)
class Example:
    """An episode to imitate, with its number of questions (its horizon)."""

    episode: Episode
    k: int
    tokens: int  # read and sampled by its calls


def sft(config: RunConfig, output: Path, resume: bool = False) -> dict[str, float]:
    """Train for `sft.tokens` tokens, and return the last metrics. Writes the model to `output`/model."""
    s, every, budget = config.sft, config.run, config.optimise.budget
    steps = s.tokens // s.batch
    if not s.start:
        raise ValueError("sft.start: name the model to start from, or a config.json for random weights")
    if not s.episodes:
        raise ValueError("sft.episodes: name the episode stores to imitate")
    if not steps:
        raise ValueError(f"sft.tokens: {s.tokens:,} are less than one update of {s.batch:,} (sft.batch)")
    if every.dev_every and not (config.tasks.dev or s.dev):
        raise ValueError(
            "run.dev_every: name stores to measure the loss on in sft.dev or tasks to evaluate on in tasks.dev, or set "
            "it to 0"
        )
    evaluated = bool(every.dev_every and config.tasks.dev)
    check_adapters(config)
    check_keep(s.keep)
    check_parts(config.tasks, needs_index=evaluated)
    check_attention(config.model.attention)
    check_sources(config, [*s.episodes, *s.dev], samples=evaluated)
    if evaluated:
        check_positions(config, s.start)
    with ranks.joined() as device, ExitStack() as open_now:
        run = open_now.enter_context(closing(open_run(output, config, resume)))
        tokenizer = load_tokenizer(s.tokenizer or s.start)
        decode = codec_of(tokenizer).decode
        root = student_over_base(config, s.start, device) if config.lora.rank else _whole_student(config, device)
        if len(tokenizer) > (width := root.model.get_input_embeddings().weight.shape[0]):
            raise ValueError(
                f"{s.start}: has {width} embeddings, but the tokenizer has {len(tokenizer)} tokens: set vocab_size to "
                f"{len(tokenizer)}"
            )
        optimiser = adamw(root, s.lr, config.optimise.weight_decay)
        checkpoint.restore(run.checkpoint, trained_tensors("student", root, optimiser))
        root.publish()
        batches = plan(load_examples(s.episodes, s.keep, decode, budget), s, steps, every.seed)
        dev = load_examples(s.dev, (), decode, budget, DEV_EPISODES)
        sampler = Sampler(config, root, tokenizer, output, run.count) if evaluated else None
        if sampler is not None:
            open_now.enter_context(closing(sampler))
        metrics: dict[str, float] = {}

        for step in run.steps(steps):
            with run.stage("compile"):
                batch = mini_batch([e.episode for e in batches[step]], budget)
            with run.stage("update"), root.passes():
                set_learning_rate(optimiser, learning_rate(s.lr, step, steps, WARMUP, "cosine"))
                metrics = imitate(root, optimiser, batch, config.optimise.max_grad_norm)
            metrics["tokens_per_second"] = batch.tokens / sum(run.seconds.values())
            metrics["rows_saved"] = 1 - batch.rows / batch.tokens
            last = step + 1 == steps
            if last or (every.dev_every and (step + 1) % every.dev_every == 0):
                with run.stage("dev"):
                    metrics |= dev_loss(root, dev, budget) if dev else {}
                    metrics |= dev_quality(sampler, step + 1) if sampler is not None else {}
            if step % 10 == 0 or last or {"dev_loss", "dev_em"} & metrics.keys():
                log_step(step, steps, metrics)
            run.metrics(step, metrics)
            if last or (step + 1) % every.save_every == 0:
                checkpoint.save(output, step + 1, trained_tensors("student", root, optimiser), every.keep)
        export_policy(output, root, tokenizer, s.start)
    return metrics


def _whole_student(config: RunConfig, device: torch.device) -> PolicyRoot:
    model = load_causal_lm(config.sft.start, master_dtype(config.model), config.run.seed)
    root: PolicyRoot = prepare(PolicyRoot(model, config.model.attention), config.model, device, trained=True)
    return root


def imitate(root: PolicyRoot, optimiser: torch.optim.Optimizer, batch: MiniBatch, max_norm: float) -> dict[str, float]:
    """−mean log p of the recorded responses, over the global batch."""
    D, total = len(batch), torch.zeros((), dtype=torch.float64, device=next(root.parameters()).device)
    for work, is_real in ranks.deal(batch.work):
        logp, *_ = root(work.packed, 1.0)
        loss = -logp.sum()
        backward(loss / D, is_real)
        total += loss.detach() * is_real  # read once, at the end, because reading makes the host wait
    loss_sum = float(ranks.total(total))
    return {"loss": loss_sum / D, "grad_norm": clipped_step(root, optimiser, max_norm, loss_sum, "the")}


@torch.no_grad()
def dev_loss(root: PolicyRoot, examples: Sequence[Example], budget: int) -> dict[str, float]:
    logp = policy_scores(root, mini_batch([e.episode for e in examples], budget), 1.0)
    return {"dev_loss": -float(logp.mean()), "dev_perplexity": math.exp(min(20.0, -float(logp.mean())))}


# ---- the examples -----------------------------------------------------------------------------------------------


def load_examples(
    stores: Sequence[str], keep: Sequence[str], decode: Callable[[Ids], str], budget: int, limit: int | None = None
) -> list[Example]:
    """The paper's filters: `correct` keeps episodes with full reward, `valid` those whose responses close all tags."""
    check_keep(keep)
    examples: list[Example] = []
    too_long: list[str] = []
    for episode in _first(stores, limit):
        k, calls = questions_in(episode, decode), [c for c in episode.calls if c.trainable]
        if not calls or ("correct" in keep and episode.reward < k):
            continue
        if "valid" in keep and not all(well_formed(decode(c.completion)) for c in episode.actions):
            continue
        if (longest := max(map(path_length, calls))) > budget:
            too_long.append(f"episode {episode.id!r}: a call needs {longest} rows and the budget is {budget}")
            continue
        examples.append(Example(episode, k, sum(map(path_length, calls))))
    warn_left_out(too_long)
    if stores and not examples:
        raise ValueError(f"{', '.join(stores)}: no episode is left (sft.keep {','.join(keep)}, budget {budget})")
    return examples


def check_keep(keep: Iterable[str]) -> None:
    if unknown := set(keep) - {"correct", "valid"}:
        raise ValueError(f"sft.keep: {', '.join(sorted(unknown))}: choose from correct, valid")


def _first(stores: Iterable[str], limit: int | None) -> Iterable[Episode]:
    for store in stores:
        yield from islice(read_episodes(store), limit)


def questions_in(episode: Episode, decode: Callable[[Ids], str]) -> int:
    """k: the number of parts of the final answer; 1 without an answer."""
    return len(answers_of(decode(episode.actions[-1].completion)) or (0,))


def well_formed(response: str) -> bool:
    tags = [response.count(t) for t in ("<think>", "</think>")]
    closed = [response.count(f"<{t}>") == response.count(f"</{t}>") for t in ("search", "answer")]
    acts = response.count("</search>") + response.count("</answer>")
    return tags == [1, 1] and all(closed) and acts == 1


def plan(examples: Sequence[Example], s: SftConfig, steps: int, seed: int) -> list[list[Example]]:
    """The batches of a run: rounds over the short tasks, then over all. Depends only on the seed."""
    rng = np.random.default_rng(seed)
    short = [e for e in examples if e.k <= s.short_k] or examples
    first = round(s.short * steps)
    return [*islice(_rounds(short, s.batch, rng), first), *islice(_rounds(examples, s.batch, rng), steps - first)]


def _rounds(pool: Sequence[Example], tokens: int, rng: np.random.Generator) -> Iterator[list[Example]]:
    """An endless series of batches of at most `tokens` tokens. Each round has every example once, in a new order."""
    batch: list[Example] = []
    while True:
        for i in rng.permutation(len(pool)):
            if batch and sum(e.tokens for e in batch) + pool[i].tokens > tokens:
                yield batch
                batch = []
            batch.append(pool[i])
