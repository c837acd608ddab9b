"""sampling.ahead: the next batch is sampled while one trains. With servers without vLLM; tests/vllm has real ones."""

import os
import shutil
import signal
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Command, memopd
from live import policy, world
from served import Broken, Servers, served, served_badly, served_until_killed
from test_passes import one_step
from test_resume import numbers, sampled
from tiny import recorded
from transformers import AutoTokenizer

from memopd.config import RunConfig, SamplingConfig, load_config
from memopd.record import read_episodes, write_episodes
from memopd.report.curves import groups
from memopd.train import engines
from memopd.train.batch import mini_batch
from memopd.train.diagnostics import off_policy
from memopd.train.learner import build
from memopd.train.losses import importance_weights
from memopd.train.metrics import read_metrics
from memopd.train.source import AheadSampler, open_source, versions
from memopd.train.terms import Terms
from memopd.train.traces import read_traces
from memopd.train.update import tokens_of

URL = "http://one"
OPTIONS = (
    "--sampling.servers", URL, "--optimise.steps", "4", "--optimise.algorithm", "grpo", "--teacher-state", "none",
    "--optimise.reference", "0", "--run.save_every", "2", "--run.dev_every", "3", "--optimise.lr", "1e-2",
)  # fmt: skip


def train(output: Path, ahead: int, *more: str, before=served) -> Command:
    policy()
    options = (*OPTIONS, "--sampling.ahead", str(ahead), *more)
    return Command("train", world() / "train.toml", "--output", output, *options, before=before)


@cache
def undisturbed() -> tuple[Path, str]:
    """A whole run, one batch ahead, and what it said."""
    output = world() / "ahead"
    ended = train(output, 1).end()
    assert ended.code == 0, ended.err
    return output, ended.err


# ---- the batches ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(monkeypatch, tmp_path):
    """Makes sources of five steps, and closes them."""
    policy()
    made = []

    def make(ahead: int, servers=Servers, **overrides: str) -> AheadSampler:
        monkeypatch.setattr(engines, "VllmEngine", servers)
        settings = {"sampling.servers": URL, "sampling.ahead": str(ahead), "teacher.state": "none"}
        config = load_config(world() / "train.toml", settings | {"optimise.algorithm": "grpo"} | overrides)
        learner = build(config, torch.device("cpu"))
        tokenizer = AutoTokenizer.from_pretrained(config.model.student)
        made.append(open_source(config, learner.student, tokenizer, tmp_path))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


def test_a_batch_is_begun_with_the_policy_of_n_updates_before(source):
    """One ahead, the policy is exactly the one before. Every batch has the episodes that it would have otherwise."""
    one = source(1)
    expected = source(1, **{"sampling.ahead": "0"})
    for step in range(5):
        episodes = one.episodes(step)
        assert {*versions(episodes)} == {max(0, step - 1)}
        assert [e.id for e in episodes] == [id for id, _ in expected._pairs(step)]
        assert one.outcomes.keys() == {e.id for e in episodes}
        assert sorted(one.sampled_ahead()) == ([step + 1] if step < 4 else [])
        assert off_policy(expected, step, [], []) == {}  # without `ahead` there is no word of it
        if step == 2:
            assert {*versions(one.dev(step + 1))} == {step + 1}  # an evaluation has the newest policy


def test_no_call_is_more_than_n_updates_old(source):
    two = source(2)
    for step in range(5):
        assert all(step - 2 <= v <= step for v in versions(two.episodes(step)))
        assert len(two._begun) + len(two._complete) == min(2, 4 - step)
    assert two.policy.engine.verified == 5  # once for every update


def test_the_assertion_notices_an_older_policy(source, monkeypatch):
    one = source(1)
    one.episodes(0)
    monkeypatch.setattr(one.policy, "refresh", lambda version: None)  # the servers never get another update
    one.episodes(1)
    with pytest.raises(AssertionError):
        one.episodes(2)


def test_an_error_of_the_thread_ends_the_run_with_its_own_line(source, tmp_path):
    broken = source(1, Broken)
    broken.episodes(0)
    with pytest.raises(ValueError, match="as planned"):
        broken.episodes(1)
    ended = train(tmp_path / "run", 1, before=served_badly).end()
    assert "memopd: http://one: as planned" in ended.line()
    assert len(read_metrics(tmp_path / "run")) == 1


def test_closing_ends_what_is_in_flight(source):
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Servers):
        def generate(self, requests):
            if any(request.episode.startswith("step-000001/") for request in requests):
                begun.set()
                assert go_on.wait(60)
            return super().generate(requests)

        def close(self):  # as VllmEngine does: open requests end
            go_on.set()
            super().close()

    slow = source(2, Slow)
    slow.episodes(0)
    assert begun.wait(60)
    slow.close()
    assert slow._begun[2].cancelled()  # it had not begun
    assert not [t for t in threading.enumerate() if t.name.startswith("sampling ahead")]


def test_interrupted_by_the_user(tmp_path):
    """Ctrl-C ends the run although a thread samples."""
    command = train(tmp_path / "run", 1, "--optimise.steps", "500")
    while command.process.is_alive() and len(read_metrics(tmp_path / "run")) < 1:
        command.process.join(0.05)
    os.kill(command.process.pid, signal.SIGINT)
    command.process.join(60)
    assert command.process.exitcode not in (None, 0)


def test_settings():
    for wrong, why in [
        ({"ahead": 1}, r"needs sampling\.servers: in one process, sampling and training take turns"),
        ({"ahead": 1, "servers": URL, "replay": "store"}, r"must be 0 with sampling\.replay"),
        ({"ahead": -1, "servers": URL}, "greater than or equal to 0"),
    ]:
        with pytest.raises(ValueError, match=why):
            SamplingConfig(**wrong)
    assert RunConfig().sampling.ahead == 0
    line = memopd("train", world() / "train.toml", "--output", "nowhere", "--sampling.ahead", "1").line()
    assert line.startswith("memopd: --sampling.ahead: needs sampling.servers:")


# ---- the weights ----------------------------------------------------------------------------------------------------

AHEAD = {"sampling.servers": URL, "sampling.ahead": "1", "sampling.replay": ""}
SETTINGS = {"optimise.mini_batch": "4", "optimise.epochs": "2"}


def older(episodes, shift=0.5):
    """The same episodes, as if another policy had sampled them: every second token was less likely for it."""

    def other(call):
        return replace(call, logprobs=call.logprobs - shift * (np.arange(len(call.logprobs)) % 2))

    return [replace(e, calls=[other(c) for c in e.calls]) for e in episodes]


def stepped(monkeypatch, episodes, settings):
    monkeypatch.setattr("test_passes.recorded", lambda episodes: given)
    given = episodes
    return one_step(SETTINGS | settings, in_advance=False)


@pytest.mark.parametrize("algorithm", ["ppo", "gspo", "own_algorithm:Reinforce"])
def test_weights_change_the_policy_loss_and_nothing_else(monkeypatch, algorithm):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    settings = {"optimise.algorithm": algorithm, "teacher.state": "none", "optimise.entropy": "0"}
    episodes = recorded(episodes=8)
    as_today = stepped(monkeypatch, episodes, settings)
    # Without `ahead`, the recorded log-probabilities are in no term: all weights are the same, bit for bit.
    again = stepped(monkeypatch, older(episodes), settings)
    assert all(torch.equal(a, b) for a, b in zip(as_today[1], again[1], strict=True))
    # With it, an older policy changes the step of the student, and no other.
    weighted = stepped(monkeypatch, older(episodes), settings | AHEAD)
    assert weighted[0]["loss_ppo"] != as_today[0]["loss_ppo"]
    assert weighted[0]["grad_norm"] != as_today[0]["grad_norm"]
    for name in ("loss_value", "critic_grad_norm", "advantage_std", "reward"):
        assert weighted[0].get(name) == as_today[0].get(name)
    # And a policy that differs by rounding only has weights of about 1.
    near = stepped(monkeypatch, episodes, settings | AHEAD)
    assert near[0]["grad_norm"] == pytest.approx(as_today[0]["grad_norm"], rel=1e-3)


def test_each_token_has_its_own_weight():
    """The pack's weights are at the places of its tokens: π_old of each against what was recorded for it."""
    batch = mini_batch(older(recorded(episodes=4)), budget=700)
    assert len(batch.work) > 1
    D = len(batch)
    flat = [v for e in batch.episodes for c in e.calls for v in c.logprobs]
    assert batch.logp_sampled.tolist() == flat
    old, advantage = torch.linspace(-3, -1, D, dtype=torch.float64), torch.arange(1.0, D + 1, dtype=torch.float64)
    known = Terms(old, old, advantage, advantage, advantage, torch.zeros(D, dtype=torch.bool))
    for work in batch.work:
        logp = torch.zeros(len(work.place), dtype=torch.float64)
        plain = tokens_of(batch, work, known, logp, logp)
        weighted = tokens_of(batch, work, known, logp, logp, torch.as_tensor(batch.logp_sampled))
        assert plain.advantage.tolist() == (work.place + 1).tolist()
        expected = [(i + 1) * min(2.0, np.exp(float(old[i]) - flat[i])) for i in work.place]
        assert weighted.advantage.tolist() == pytest.approx(expected)


def test_a_call_without_log_probabilities_is_named():
    first, *rest = recorded(episodes=4)
    unknown = replace(first, calls=[replace(c, logprobs=None, name="episode 'x': call 0") for c in first.calls])
    with pytest.raises(ValueError, match="episode 'x': call 0: has no log-probabilities"):
        _ = mini_batch([unknown, *rest], budget=700).logp_sampled


# ---- whole runs -----------------------------------------------------------------------------------------------------


def test_metrics_and_report():
    output, said = undisturbed()
    lines = read_metrics(output)
    assert [line["staleness"] for line in lines] == [line["staleness_max"] for line in lines] == [0, 1, 1, 1]
    assert all(line["sampled_again"] == 0 for line in lines)
    assert lines[0]["importance_weight"] == pytest.approx(1, abs=1e-5)
    assert all(abs(line["importance_weight"] - 1) > 1e-4 for line in lines[1:])
    assert any(line["truncated"] > 0 for line in lines[1:])
    assert "staleness 1  weight " in said
    shown = {chart["key"]: chart["title"] for group in groups([lines]) for chart in group["charts"]}
    assert shown["staleness"] == "Staleness"
    assert shown["truncated"] == "Truncated weights"
    # The weights that are reported are those of π_old, which the traces have, against the recorded policy.
    episodes = {e.id: e for e in read_episodes(output / "episodes" / "step-000001.parquet")}
    for (id, t), trace in read_traces(output / "traces" / "step-000001.parquet").items():
        logprobs = torch.tensor(episodes[id].calls[t].logprobs).float()
        weights = importance_weights(torch.as_tensor(trace.logp_old), logprobs)
        assert 0 < weights.min() <= weights.max() <= 2


def test_killed_with_a_batch_in_flight(tmp_path):
    """SIGKILL in the third step, while the batch of the fourth is sampled. The checkpoint is of two steps. The batch
    of the third is in a file, because the policy of one update, which sampled it, is gone."""
    whole, _ = undisturbed()
    run, lost = tmp_path / "run", tmp_path / "lost"
    command = train(run, 1, before=served_until_killed)
    command.process.join()
    assert command.process.exitcode == -signal.SIGKILL
    assert (run / "checkpoints" / "latest").read_text().startswith("step-000002")
    shutil.copytree(run, lost)
    assert memopd("report", lost).code == 0  # although it has episodes that nothing was trained on
    ended = train(run, 1, "--resume").end()
    assert ended.code == 0, ended.err
    assert "sampled again" not in ended.err
    assert numbers(run) == numbers(whole)
    assert sampled(run) == sampled(whole)

    (lost / "episodes" / "step-000002.parquet").unlink()
    ended = train(lost, 1, "--resume").end()
    assert ended.code == 0, ended.err
    assert "the episodes step-000002/* that the run had sampled ahead are lost: they are sampled again" in ended.err
    assert [line["sampled_again"] for line in read_metrics(lost)] == [0, 0, 8, 0]
    assert [line["staleness"] for line in read_metrics(lost)] == [0, 1, 0, 1]
    assert numbers(lost)[:2] == numbers(whole)[:2]
    assert numbers(lost)[2] != numbers(whole)[2]


def test_a_batch_of_a_later_policy_is_not_taken(source, tmp_path):
    """As when the user goes back to an older checkpoint: that run never had this policy."""
    one = source(1)
    episodes = one.episodes(0)
    file = tmp_path / "episodes" / "step-000003.parquet"

    def recorded_with(version, ids):
        made = [
            replace(e, id=id, calls=[replace(c, policy_version=version) for c in e.calls])
            for e, id in zip(episodes, ids, strict=True)
        ]
        write_episodes(file, made, overwrite=True)

    ids = [id for id, _ in one._pairs(3)]
    recorded_with(3, ids)
    assert one._recorded(3, version=3) is not None
    assert one._recorded(3, version=2) is None
    recorded_with(3, ids[::-1])
    assert one._recorded(3, version=3) is None
    file.write_bytes(file.read_bytes()[:-40])
    assert one._recorded(3, version=3) is None
