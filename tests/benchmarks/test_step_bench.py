"""Training updates by stage, and packed beside unshared: the accounting by hand, and real runs among the slow tests."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import step, step_arm
from benchmarks.__main__ import app
from benchmarks.drift import ALONE, PACKED, REPLAYED, compared, run_drift
from benchmarks.output import markdown
from benchmarks.step import result_of, run_step, run_together, settings_of, source_tree
from benchmarks.tables import load, plot, tables_of
from memopd.config import RunConfig, from_tables
from memopd.train.traces import Trace, write_traces
from memopd.world.demonstrations import write_world
from memopd.world.encyclopedia import Difficulty

ROOT = Path(__file__).parents[2]


def noted(seconds, sample, update):
    stages = {"sample": {"seconds": sample, "peak_bytes": 5}, "update": {"seconds": update, "peak_bytes": 9}}
    return {"seconds": seconds, "stages": stages, "metrics": {"rows_saved": 0.4}}


def test_the_first_update_is_not_counted_and_the_rest_are_medians(tmp_path):
    run = {"steps": [noted(100, 50, 50), noted(5, 1, 3), noted(7, 2, 4), noted(9, 3, 5)], "kernels": {}, "sampler": []}
    memory = dict.fromkeys(("trained", "weights_bytes", "optimiser_bytes"), 2**30)
    result = result_of(RunConfig(), "against", "packed-full", [run | {"memory": memory}])
    stages = {s.name: s for s in result.stages}
    assert (result.seconds, result.updates, result.per_hour) == (7, 3, 3600 / 7)
    assert (stages["sample"].seconds, stages["update"].seconds, stages["other"].seconds) == (2, 4, 1)
    assert stages["update"].peak_bytes == 9
    assert stages["score"].seconds == 0
    (tmp_path / "r.jsonl").write_text(json.dumps(result.as_dict()))
    made = tables_of(load(tmp_path / "r.jsonl"))
    assert "| updates per hour | 514 |" in markdown(made[0])
    assert "| optimisers, GiB | 1.00 |" in markdown(made[1])


def test_arms_differ_in_sharing_and_adapters_alone():
    config = from_tables({"model": {"adapter": "a"}, "lora": {"rank": 4}, "optimise": {"tasks": 2, "samples": 3}}, "t")
    full, lora = (settings_of(config, arm, 4, 16, critic=False) for arm in ("unshared-full", "packed-lora"))
    assert (full.optimise.share, full.lora.rank, full.model.adapter) == (False, 0, "")
    assert (lora.optimise.share, lora.lora.rank, lora.model.adapter) == (True, 16, "")
    assert full.optimise.mini_batch == 6
    assert full.optimise.lr == full.optimise.critic_lr == 0


def test_another_teacher_does_not_get_the_adapter_of_the_configurations(tmp_path, monkeypatch):
    (tmp_path / "c.toml").write_text('[model]\nteacher = "a"\nteacher_adapter = "adapter-of-a"\n')
    seen = []
    monkeypatch.setattr(step, "run_step", lambda config, *_: seen.append(config.model) or [])
    for more in ([], ["--teacher", "b"]):
        CliRunner().invoke(app, ["step", str(tmp_path / "c.toml"), "--json", *more], catch_exceptions=False)
    assert [(m.teacher, m.teacher_adapter) for m in seen] == [("a", "adapter-of-a"), ("b", "")]


def test_a_source_tree_is_a_folder_or_a_commit():
    with source_tree(str(ROOT)) as tree:
        assert tree == ROOT
    with pytest.raises(ValueError, match="neither a folder"), source_tree("no-such-commit"):
        pass


def test_kernels_are_counted_by_class():
    made = step_arm.summary({"sm90_xmma_gemm": [2, 3.0], "flash_fwd": [1, 1.0], "nvjet_tst": [1, 0.5]}, 6.0)
    assert made["classes"] == {"matrix products": 3.5, "attention": 1.0}
    assert made["top"][0] == {"name": "sm90_xmma_gemm", "count": 2, "seconds": 3.0}


def test_the_samplers_bound_reads_weights_and_caches_once_per_step(monkeypatch):
    """By hand: 2 sequences with 10 cached tokens, 3 steps, so 10, 12 and 14 tokens of the cache are read."""
    model = torch.nn.Linear(4, 5, bias=False)  # 80 bytes, the embedding and the head
    text = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=1, head_dim=2)
    model.config = SimpleNamespace(get_text_config=lambda: text)
    model.get_input_embeddings = model.get_output_embeddings = lambda: model
    model.dtype = torch.float32
    notes = step_arm.Notes(1, profile=True)
    notes.engine, notes.decodes = SimpleNamespace(model=model), [(2, 10, 3, 6.0)]
    monkeypatch.setattr(step_arm, "copy_bandwidth", lambda: 100.0)
    [bound] = step_arm.sampler_bound(notes)
    read = 3 * 80 + (10 + 12 + 14) * 2 * 2 * 4
    assert bound["step_ms"] == 2000
    assert bound["bound_ms"] == pytest.approx(1e3 * read / 3 / 100)
    assert bound["of_bound"] == pytest.approx(6.0 / (read / 100))


def drift_runs(folder, off):
    for name, shift in ((PACKED, 0.0), (REPLAYED, off), (ALONE, 0.0)):
        (folder / name / "traces").mkdir(parents=True)
        lines = [{"step": s, "reward": 1.0, "loss_opd": 0.5, "seconds_update": 2.0} for s in range(2)]
        (folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for s in range(2):
            logp = np.array([-1, -2 - s * shift], np.float32)
            trace = Trace("e", 0, logp, np.zeros(2, np.float32), None, None, None)
            write_traces(folder / name / "traces" / f"step-{s:06d}.parquet", [trace])


def test_drift_is_the_difference_of_the_same_tokens(tmp_path):
    drift_runs(tmp_path, off=0.25)
    first, second = compared(tmp_path, 2)
    assert (first.largest, second.largest, second.mean) == (0, 0.25, 0.125)
    assert (first.packed_kl, first.alone_reward, first.packed_seconds) == (0.5, 1.0, 2.0)
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(r.as_dict()) + "\n" for r in (first, second)))
    assert "| 2 | 2 | 2.5e-01 |" in markdown(tables_of(load(tmp_path / "r.jsonl"))[0])
    plot([first, second], tmp_path / "d.png")
    assert (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"


def test_other_calls_are_not_compared(tmp_path):
    drift_runs(tmp_path, off=0.0)
    other = Trace("another", 0, np.zeros(1, np.float32), np.zeros(1, np.float32), None, None, None)
    write_traces(tmp_path / REPLAYED / "traces" / "step-000000.parquet", [other])
    with pytest.raises(ValueError, match="other calls in update 1"):
        list(compared(tmp_path, 2))


@pytest.fixture
def config(tmp_path):
    write_world(tmp_path, 200, 0, Difficulty(), 0, lambda _, items: items)
    student = str(ROOT / "models" / "student")
    return from_tables(
        {
            "model": {"student": student, "teacher": student, "dtype": "bfloat16"},
            "tasks": {
                "train": str(tmp_path / "tasks" / "train-q1.parquet"),
                "index": str(tmp_path / "index"),
                "max_context": 900,
            },
            "sampling": {"max_tokens": 8, "batch": 2},
            "optimise": {"tasks": 1, "samples": 2, "mini_batch": 2, "budget": 2048, "algorithm": "grpo"},
            "teacher": {"weight": 1.0},
        },
        "test",
    )


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_updates_of_adapters_beside_all_weights(config, together):
    lora, full = run_step(config, ["packed-lora", "packed-full"], steps=2, rank=4, critic=True, together=together)
    assert [s.name for s in full.stages] == ["sample", "compile", "score", "advantages", "update", "other"]
    # AdamW has two moments in float32 of every trained weight of student and critic, and counts its steps.
    for arm in (lora, full):
        assert 0 < arm.memory["optimiser_bytes"] - 2 * 4 * arm.memory["trained"] < 10_000
    assert lora.memory["trained"] < full.memory["trained"] / 20
    assert lora.memory["copy_bytes"] == full.memory["copy_bytes"] == 0  # the sampler reads the trained weights
    assert lora.memory["weights_bytes"] < full.memory["weights_bytes"] / 3  # one base and adapters; else four models
    assert 0 < lora.rows_saved < 1


@pytest.mark.slow
def test_one_arm_that_fails_ends_those_that_wait(config):
    broken = replace(config, tasks=replace(config.tasks, max_context=1))
    with pytest.raises(ValueError, match="the training failed"):
        list(run_together([(config, ROOT, 2, False), (broken, ROOT, 2, False)]))


@pytest.mark.slow
def test_training_packed_and_unshared(config, tmp_path):
    steps = list(run_drift(config, tmp_path / "runs", steps=2, seed=0))
    assert [s.drift_step for s in steps] == [0, 1]
    assert all(s.largest < 0.2 for s in steps)  # bfloat16
    again = list(run_drift(config, tmp_path / "runs", steps=2, seed=0))  # reads what is there
    assert again == steps
