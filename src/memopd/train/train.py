"""The training loop: sample, compile, score, advantages, update. One line per stage of the data flow."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from memopd.agent.codec import codec_of
from memopd.agent.parts import check_parts
from memopd.attention import check_attention
from memopd.config import RunConfig
from memopd.models.load import load_tokenizer
from memopd.train import checkpoint, ranks
from memopd.train.batch import compile_batches, usable
from memopd.train.check import check_equivalence
from memopd.train.diagnostics import describe, dev_quality, log_step, off_policy, quality, warn_left_out
from memopd.train.engines import check_positions
from memopd.train.learner import build, check_objective, export_policy
from memopd.train.log import open_run
from memopd.train.scoring import score_batches
from memopd.train.source import Sampler, check_sources, open_source
from memopd.train.terms import make_terms
from memopd.train.traces import make_traces
from memopd.train.update import update


def train(config: RunConfig, output: Path, resume: bool = False) -> dict[str, float]:
    """Train for all steps of `config` and return the last metrics. Writes everything to `output`."""
    check_objective(config)
    check_attention(config.model.attention)
    replay = config.sampling.replay
    check_parts(config.tasks, needs_index=not replay)
    check_sources(config, [replay] if replay else [], samples=not replay)
    if not replay:
        check_positions(config, config.model.student)
    with ranks.joined() as device, closing(open_run(output, config, resume)) as run:
        learner = build(config, device)
        learner.restore(run.checkpoint)
        tokenizer = load_tokenizer(config.model.student)
        decode, every, steps = codec_of(tokenizer).decode, config.run, config.optimise.steps
        metrics: dict[str, float] = {}

        with closing(open_source(config, learner.student, tokenizer, output, run.count)) as source:
            for step in run.steps(steps):
                with run.stage("sample"):
                    episodes = source.episodes(step)
                with run.stage("compile"):
                    kept, left_out = usable(episodes, config.optimise.budget, config.sampling.temperature)
                    warn_left_out(left_out)
                    batches = compile_batches(kept, config.optimise, every.seed, step, left_out)
                if step == 0 or (every.check_every and step % every.check_every == 0):
                    with run.stage("check"):
                        check_equivalence(learner, batches[0], output, step, run.progress)
                with run.stage("score"):
                    scored, guides = score_batches(learner, batches, decode)
                with run.stage("advantages"):
                    terms, metrics = make_terms(batches, scored, learner.algorithm)
                with run.stage("update"):
                    metrics |= update(learner, batches, terms, guides, step)

                metrics |= describe(episodes, batches, scored) | quality(source, episodes)
                metrics |= off_policy(source, step, batches, scored)
                metrics["tokens_per_second"] = sum(b.tokens for b in batches) / sum(run.seconds.values())
                if isinstance(source, Sampler) and every.dev_every and (step + 1) % every.dev_every == 0:
                    with run.stage("dev"):
                        metrics |= dev_quality(source, step + 1)
                log_step(step, steps, metrics)
                run.episodes(step, episodes)
                run.traces(step, make_traces(kept, batches, terms, guides, learner.critic is not None))
                run.metrics(step, metrics)
                if (step + 1) % every.save_every == 0 or step + 1 == steps:
                    with run.stage("sample"):
                        run.ahead(source.sampled_ahead())
                    checkpoint.save(output, step + 1, learner.tensors(), every.keep)
        export_policy(output, learner.student, tokenizer, config.model.student)
    return metrics
