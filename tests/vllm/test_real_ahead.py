"""Training that samples the next batches from a real server while one trains."""

import copy
import os
import signal
import time
from collections import defaultdict
from contextlib import suppress

import numpy as np
import pytest
from real_vllm import free_port, requests_running, scorer, start_training
from safetensors.torch import load_file

from memopd.engine.protocol import Completion
from memopd.engine.vllm import weights as weight_updates
from memopd.record import read_episodes
from memopd.train.metrics import read_metrics

SLOW = ("--tasks.environment", "real_vllm:SlowTool")  # so that weights change more often in the middle of a batch


def ended(run, *processes):
    """The outputs of a run's processes. Meanwhile all weights that the server gets are kept, as RUN/kept-VERSION."""
    while any(process.poll() is None for process in processes):
        for folder in run.glob("served/weights-*"):
            with suppress(FileNotFoundError, FileExistsError):  # it is removed when the next version is loaded
                os.link(folder / "model.safetensors", run / folder.name.replace("weights", "kept"))
        time.sleep(0.01)
    outputs = [process.communicate()[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return outputs


def policy_after(updates, run, model):
    updated = copy.deepcopy(model)
    updated.load_state_dict(load_file(run / f"kept-{updates}"))
    return updated


def episodes_of(run, step):
    return list(read_episodes(run / "episodes" / f"step-{step:06d}.parquet"))


def gaps_of(run, steps, model):
    """By policy version: how far the recorded log-probabilities are from those of that version, and of the next."""
    calls = defaultdict(list)
    for step in range(steps):
        for episode in episodes_of(run, step):
            for call in episode.calls:
                calls[call.policy_version].append(call)
    gaps = {}
    for version, sampled in calls.items():
        pairs = [(c.prompt, c.completion) for c in sampled]
        said = [Completion(c.completion, c.logprobs, c.stop) for c in sampled]
        gaps[version] = [
            weight_updates.gap(scorer(policy_after(v, run, model))(pairs, 1.0), said) for v in (version, version + 1)
        ]
    return gaps


def test_one_batch_ahead(server, first, searchable, tmp_path):
    """Four steps. Every batch is of the policy before; what was recorded is what that policy gives."""
    run, steps = tmp_path / "run", 4
    options = ("--sampling.ahead", "1", "--optimise.steps", str(steps))
    (said,) = ended(run, start_training(searchable, first[0], server.url, run, *options))
    lines = read_metrics(run)
    assert [m["staleness"] for m in lines] == [m["staleness_max"] for m in lines] == [0, 1, 1, 1]
    for step in range(steps):
        versions = {c.policy_version for e in episodes_of(run, step) for c in e.calls}
        assert versions == {max(0, step - 1)}
    gaps = gaps_of(run, steps, first[1])
    assert sorted(gaps) == [0, 1, 2]
    assert all(own < 1e-3 < other for own, other in gaps.values()), gaps
    assert lines[0]["importance_weight"] == pytest.approx(1, abs=1e-4)
    assert all(m["importance_weight"] != pytest.approx(1, abs=1e-4) for m in lines[1:])
    assert "staleness 1  weight" in said
    print(f"\nrecorded against its own policy and the next: {gaps}")
    print("weights", [f"{m['importance_weight']:.3f}" for m in lines], "cut", [f"{m['truncated']:.3f}" for m in lines])


def test_interrupted_with_a_batch_in_flight(server, first, searchable, tmp_path):
    """Ctrl-C, as from a terminal: the run ends, and the server is asked for nothing more."""
    run, answers, batch = tmp_path / "run", tmp_path / "answers", 8 * 4  # eight episodes of four calls
    answers.touch()
    options = ("--sampling.ahead", "1", "--optimise.steps", "500", "--tasks.environment", "real_vllm:Counted")
    process = start_training(searchable, first[0], server.url, run, *options, ANSWERS=str(answers))
    while process.poll() is None and answers.stat().st_size <= 2 * batch:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode not in (0, None), said
    limit = time.monotonic() + 30
    while requests_running(server):
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_killed_with_a_batch_in_flight_and_resumed(server, first, searchable, tmp_path):
    """SIGKILL after the checkpoint of two steps, while the fourth batch is sampled. The third is in a file."""
    run, place = tmp_path / "run", (searchable, first[0], server.url, tmp_path / "run")
    answers, batch = tmp_path / "answers", 8 * 4  # eight episodes of four calls
    answers.touch()
    counted = ("--tasks.environment", "real_vllm:Counted")
    options = ("--sampling.ahead", "1", "--optimise.steps", "5", "--run.save_every", "2", *counted)
    process = start_training(*place, *options, ANSWERS=str(answers))
    while process.poll() is None and answers.stat().st_size <= 3 * batch:
        time.sleep(0.001)
    process.kill()
    assert answers.stat().st_size < 4 * batch
    _, said = process.communicate()
    assert process.returncode == -9, said
    assert (run / "checkpoints" / "latest").read_text().startswith("step-000002")
    assert not (run / "episodes" / "step-000003.parquet").exists()
    before = [episodes_of(run, step) for step in range(3)]
    (said,) = ended(run, start_training(*place, *options, "--resume", ANSWERS=str(answers)))
    assert "sampled again" not in said
    assert [episodes_of(run, step) for step in range(3)] == before
    lines = read_metrics(run)
    assert [m["step"] for m in lines] == [0, 1, 2, 3, 4]
    assert [m["staleness"] for m in lines] == [0, 1, 1, 1, 1]
    assert {m["sampled_again"] for m in lines} == {0}


def test_two_batches_ahead_on_two_ranks(server, first, searchable, tmp_path):
    """The servers get new weights while both ranks sample: every call is of one policy, at most two updates old."""
    run, steps = tmp_path / "run", 5
    options = ("--sampling.ahead", "2", "--optimise.steps", str(steps), "--sampling.batch", "2", *SLOW)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        start_training(searchable, first[0], server.url, run, *options, **place, RANK=str(r), LOCAL_RANK=str(r))
        for r in range(2)
    ]
    for said in ended(run, *ranks):
        assert "down" not in said  # no completion was of two policies
    lines = read_metrics(run)
    assert len(lines) == steps
    assert max(m["staleness_max"] for m in lines) == 2
    mixed = 0
    for step in range(steps):
        for episode in episodes_of(run, step):
            versions = [c.policy_version for c in episode.calls]
            assert all(step - 2 <= v <= step for v in versions)
            assert versions == sorted(versions)
            mixed += versions[0] != versions[-1]
    gaps = gaps_of(run, steps, first[1])
    assert all(own < 1e-3 for own, _ in gaps.values()), gaps
    print(f"\n{mixed} episodes of {steps * 8} have calls of two policies; gaps {gaps}")


@pytest.mark.slow  # for its numbers
@pytest.mark.parametrize("environment", ["Talk", "SlowTool"])
def test_seconds_with_and_without(server, first, searchable, tmp_path, environment):
    """Seconds per update, in turns, because other work on the machine comes and goes."""
    seconds = {"0": [], "1": []}
    for turn, ahead in enumerate("0110"):
        run = tmp_path / f"{turn}"
        options = (
            "--sampling.ahead",
            ahead,
            "--optimise.steps",
            "8",
            "--tasks.environment",
            f"real_vllm:{environment}",
        )
        ended(run, start_training(searchable, first[0], server.url, run, *options))
        lines = read_metrics(run)[2:]
        seconds[ahead] += [sum(v for name, v in m.items() if name.startswith("seconds_")) for m in lines]
        stages = {n: float(np.median([m[n] for m in lines])) for n in lines[0] if n.startswith("seconds_")}
        print(f"\n{environment}, ahead {ahead}: medians", {n.partition("_")[2]: round(v, 2) for n, v in stages.items()})
    zero, one = (float(np.median(seconds[ahead])) for ahead in "01")
    print(f"{environment}: {zero:.2f} s per update, {one:.2f} s one ahead: {zero / one:.2f} times as fast")
