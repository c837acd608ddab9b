"""The training loop: sample, compile, score, advantages, update. One line per stage of the data flow."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from memopd.config import RunConfig
from memopd.optimise import checkpoint, ranks
from memopd.optimise.batch import compile_batches, usable
from memopd.optimise.check import check_equivalence
from memopd.optimise.diagnostics import describe, dev_quality, quality, say, warn_left_out
from memopd.optimise.learner import build, export_model
from memopd.optimise.log import open_run
from memopd.optimise.scoring import score_batches
from memopd.optimise.source import Replay, Sampler, Source
from memopd.optimise.terms import make_terms
from memopd.optimise.update import update
from memopd.record.rollout import codec_of


def train(config: RunConfig, output: Path, resume: bool = False, replay: Path | None = None) -> dict[str, float]:
    """Train to the end of `config` and return the last metrics. Everything is under `output`."""
    device = ranks.start()
    run = open_run(output, config, resume)
    tokenizer = AutoTokenizer.from_pretrained(config.model.student, trust_remote_code=False)
    learner = build(config, device)
    if run.checkpoint is not None:
        for name, into in learner.tensors().items():
            checkpoint.load(run.checkpoint, name, into)
    source: Source
    if replay is not None:
        source = Replay(replay, config.optimise.tasks * config.optimise.samples)
    else:
        source = Sampler(config, learner.student, tokenizer)

    metrics: dict[str, float] = {}
    for step in range(run.first, config.optimise.steps):
        with run.stage("sample"):
            episodes = source.episodes(step)
        with run.stage("compile"):
            kept, left_out = usable(episodes, config.optimise.budget)
            batches = compile_batches(kept, config.optimise, config.run.seed, step)
        if step == 0 or (config.run.check_every and step % config.run.check_every == 0):
            with run.stage("check"):
                check_equivalence(learner, batches, run.path, step)
        with run.stage("score"):
            scored, guides = score_batches(learner, batches, codec_of(tokenizer).decode)
        with run.stage("advantages"):
            terms, summary = make_terms(batches, scored, config.optimise)
        with run.stage("update"):
            updates = update(learner, batches, terms, guides, step)

        metrics = summary | updates | describe(episodes, kept, batches, scored) | quality(source, episodes, tokenizer)
        metrics |= {"left_out": float(len(left_out))}
        warn_left_out(left_out)
        if isinstance(source, Sampler) and config.run.dev_every and (step + 1) % config.run.dev_every == 0:
            with run.stage("dev"):
                metrics |= dev_quality(source, step + 1, tokenizer)
        tokens = sum(b.tokens for b in batches)
        metrics["tokens_per_second"] = tokens / max(sum(run.seconds.values()), 1e-9)
        run.episodes(step, episodes)
        run.metrics(step, metrics)
        say(step, config.optimise.steps, metrics)
        if (step + 1) % config.run.save_every == 0 or step + 1 == config.optimise.steps:
            checkpoint.save(output, step + 1, learner.tensors(), {}, config.run.keep)
    if isinstance(source, Sampler):
        source.close()
    export_model(output, learner.student, tokenizer)
    ranks.stop()
    return metrics
