"""The shared runs: what is there is skipped, what was made otherwise is not taken for it, a killed command goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from small import folder

from memopd.evaluate import Measures
from memopd.evaluate.summary import by_task
from paper.evaluation import evaluate, is_made, measured_with, read_plan
from paper.jobs import run_jobs
from paper.settings import Convention, Suite, load
from paper.suite import Work, locked, reuse

ROOT = Path(__file__).parents[2]


@pytest.fixture
def work(tmp_path):
    wanted = (("student-mem1", 1), ("student-truncate", 1), ("ppo", 2), ("memopd", 2))
    return Work(load(Suite, folder() / "suite.toml"), tmp_path / "work", wanted)


def test_arms_differ_in_the_teachers_states_alone(work):
    ppo, memopd = (work.config_of(arm, 1) for arm in ("ppo", "memopd"))
    assert (ppo.teacher.state, memopd.teacher.state) == ("none", "aligned")
    assert replace(ppo, teacher=memopd.teacher) == memopd
    assert ppo.run.seed == 1
    assert replace(work, overrides=(("optimise.lr", "0.5"),)).config_of("ppo", 1).optimise.lr == 0.5


def test_arms_with_the_same_settings_are_one_run(work):
    """If dev chooses the paper's λ, its arm is not trained and evaluated again."""
    arms = {**work.suite.arms, "memopd-0.02": {"teacher.state": "aligned", "teacher.weight": 0.02}}
    both = replace(
        work, suite=replace(work.suite, arms=arms), wanted=(("memopd", 2), ("memopd-0.02", 2), ("memopd-0.02", 1))
    )
    same = replace(both, overrides=(("teacher.weight", "0.02"),))
    both = replace(both, overrides=(("teacher.weight", "0.5"),))
    assert [job.name for job in both.training_jobs()][:2] == ["train:memopd-0", "train:memopd-0.02-0"]
    assert [job.name for job in same.training_jobs()] == ["train:memopd-0", "train:memopd-1"]
    assert [(name, [part.k for part in plan.parts]) for name, plan in same.plans()] == [
        ("memopd-0", [2, 1]), ("memopd-1", [2, 1]),
    ]  # fmt: skip
    for where in (Work.run_of, Work.result_of):
        last = () if where is Work.run_of else (2,)
        assert (
            where(same, "memopd-0.02", 1, *last) == where(same, "memopd", 1, *last) == where(both, "memopd", 1, *last)
        )
        assert where(both, "memopd-0.02", 1, *last) != where(both, "memopd", 1, *last)


def write_steps(run, count):
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(count)))


def test_results_of_weights_that_are_trained_anew_are_measured_anew(work, tmp_path):
    """The run was removed, its results were not: they do not count once the new weights are there."""
    training = next(job for job in work.jobs() if job.name == "train:ppo-0")
    evaluation = next(job for job in work.jobs() if job.name == "evaluate:ppo-0")
    weights, result = work.run_of("ppo", 0) / "model", Path(dict(work.plans())["ppo-0"].parts[0].output)
    started = []

    def trains():
        started.append("train")
        shutil.copytree(folder() / "model", weights)
        (work.run_of("ppo", 0) / "config.json").write_text(work.config_of("ppo", 0).as_json())
        return ["true"]

    def evaluates():
        started.append("evaluate")
        result.write_text(measured(dict(work.plans())["ppo-0"].weights()))
        return ["true"]

    def measured(digest):
        plan = dict(work.plans())["ppo-0"]
        return json.dumps({"settings": measured_with(plan.parts[0], plan.settings), "weights": digest})

    result.parent.mkdir(parents=True)
    result.write_text(measured("of the run that was removed"))
    jobs = [replace(training, command=trains), replace(evaluation, command=evaluates)]
    assert run_jobs(jobs, 2).unfinished == []
    assert started == ["train", "evaluate"]
    run_jobs(jobs, 2)
    assert started == ["train", "evaluate"]


def test_a_run_that_cannot_be_read_is_left_alone(work):
    adapter = work.folder / "q2" / "other-0" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").touch()
    reuse(work)
    (adapter.parent / "config.json").write_text('{"a setting of": "another version"}')
    reuse(work)


def test_training_resumes_what_is_there_and_skips_what_is_finished(work):
    job = next(job for job in work.training_jobs() if job.name == "train:memopd-1")
    assert not job.finished()
    assert "--resume" not in job.command()
    run = work.run_of("memopd", 1)
    (run / "model").mkdir(parents=True)
    (run / "config.json").write_text(work.config_of("memopd", 1).as_json())
    assert not job.finished()
    assert "--resume" in job.command()
    (run / "model" / "config.json").touch()
    assert job.finished()
    (run / "config.json").write_text(work.config_of("memopd", 0).as_json())
    with pytest.raises(ValueError, match="other settings"):
        job.finished()


def test_a_run_is_not_trained_again_if_its_metrics_and_all_its_evaluations_are_here(work):
    job = next(job for job in work.training_jobs() if job.name == "train:ppo-0")
    run, plan = work.run_of("ppo", 0), dict(work.plans())["ppo-0"]
    run.mkdir(parents=True)
    (run / "config.json").write_text(work.config_of("ppo", 0).as_json())
    (part,) = plan.parts
    Path(part.output).parent.mkdir(parents=True)
    Path(part.output).write_text(json.dumps({"settings": measured_with(part, plan.settings), "weights": "0"}))
    assert not job.finished()  # the learning curve is missing
    write_steps(run, 3)
    assert not job.finished()  # a part of the curve: of a run that was ended early
    write_steps(run, 4)
    assert job.finished()
    (run / "checkpoints").mkdir()  # a new run of these settings, ended between its last step and its adapter
    assert not job.finished()
    (run / "checkpoints").rmdir()
    cold = replace(work, suite=replace(work.suite, conventions={"cold": Convention(temperature=0.01)}))
    assert not next(cold.training_jobs()).finished()  # another way to sample still needs the weights
    Path(part.output).write_text(json.dumps({"settings": {}, "weights": "0"}))
    assert not job.finished()  # measured with other settings


def test_evaluation_makes_what_is_missing_and_nothing_twice(work, capsys):
    name, plan = next(work.plans())
    assert name == "student-0"
    assert [(p.system, p.k, p.memory) for p in plan.parts] == [
        ("student-mem1", 1, "mem1"),
        ("student-truncate", 1, "truncate"),
    ]
    evaluate(plan)
    assert all(is_made(plan, part) for part in plan.parts)
    files = [Path(part.output) for part in plan.parts]
    before = [f.stat().st_mtime_ns for f in files]
    assert len(json.loads(files[0].read_text())["measures"]) == 3
    files[1].unlink()
    evaluate(plan)
    assert files[0].stat().st_mtime_ns == before[0]
    assert capsys.readouterr().out.count("student-truncate") == 2
    warmer = replace(plan, settings=replace(plan.settings, temperature=0.5))
    assert not is_made(warmer, warmer.parts[0])  # made with other settings
    found = json.loads(files[0].read_text())
    files[0].write_text(json.dumps(found | {"weights": "of another model"}))
    assert not is_made(plan, plan.parts[0])
    assert is_made(replace(plan, model="gone"), plan.parts[0])  # results outlive the model
    files[0].write_text(json.dumps(found))
    assert found["inputs"].keys() == {"model", "tasks", "index"}
    assert (found["played_with"]["topk"], found["played_with"]["turns"]) == (3, 0)
    found["inputs"]["tasks"]["sha256"] = "of other tasks"
    files[0].write_text(json.dumps(found))
    assert not is_made(plan, plan.parts[0])


def test_several_episodes_of_a_task(work):
    plan = next(work.plans())[1]
    part = plan.parts[0]
    twice = replace(plan, parts=(part,), settings=replace(plan.settings, samples=2))
    evaluate(twice)
    measures = [Measures(**m) for m in json.loads(Path(part.output).read_text())["measures"]]
    assert len(measures) == 6
    assert len(by_task(measures, "em")) == 3  # their mean counts
    assert not is_made(plan, part)  # asked for once, made twice


def test_a_model_that_is_sampled_with_every_seed_has_a_process_for_each(work):
    often = replace(work, suite=replace(work.suite, repeated=("student-mem1",)))
    plans = dict(often.plans())
    fixed = {name: [p.system for p in plan.parts] for name, plan in plans.items() if name.startswith("student")}
    first, *others = often.suite.seeds
    assert fixed[f"student-{first}"] == ["student-mem1", "student-truncate"]
    assert others
    assert all(fixed[f"student-{seed}"] == ["student-mem1"] for seed in others)


def test_a_plan_is_read_as_it_was_written(work, tmp_path):
    plan = next(work.plans())[1]
    (tmp_path / "plan.json").write_text(plan.as_json())
    assert read_plan(tmp_path / "plan.json") == plan


def test_evaluations_wait_for_their_training_and_come_before_the_next_seed(work):
    assert [job.name for job in work.jobs()] == [
        "train:ppo-0", "train:memopd-0", "evaluate:student-0", "evaluate:ppo-0", "evaluate:memopd-0",
        "train:ppo-1", "train:memopd-1", "evaluate:ppo-1", "evaluate:memopd-1",
    ]  # fmt: skip
    assert [job.name for job in work.evaluation_jobs() if job.ready()] == ["evaluate:student-0"]
    model = work.run_of("memopd", 1) / "model"
    model.mkdir(parents=True)
    (model / "config.json").touch()
    assert [job.name for job in work.evaluation_jobs() if job.ready()] == ["evaluate:student-0", "evaluate:memopd-1"]


def test_two_commands_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(ValueError, match="another command"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


MAIN = """
title = "Small"
suite = "{folder}/suite.toml"
horizons = [1, 2]
systems = ["student-mem1", "ppo", "memopd"]
compare = [["memopd", "ppo"]]
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_command_goes_on(tmp_path):
    (tmp_path / "main.toml").write_text(MAIN.format(folder=folder()))
    work, results = tmp_path / "work", tmp_path / "results"
    line = [sys.executable, "-m", "paper", "main", "--config", tmp_path / "main.toml"]
    line = [str(x) for x in (*line, "--work", work, "--output", results, "--seeds", 0)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for until in (  # a run under way; a run finished; a result there
        lambda: any(work.glob("q2/*/metrics.jsonl")),
        lambda: any(work.glob("q2/*/model/config.json")),
        lambda: any(work.glob("evaluations/test/*.json")),
    ):
        process = subprocess.Popen(line, cwd=ROOT, env=environment)
        while not until():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = {f: f.stat().st_mtime_ns for f in work.glob("evaluations/test/*.json")}
    subprocess.run(line, cwd=ROOT, env=environment, check=True)
    assert kept
    assert all(f.stat().st_mtime_ns == when for f, when in kept.items())
    made = json.loads((results / "main.json").read_text())
    assert made["missing"] == []
    assert {(r["system"], r["k"]) for r in made["results"]} == {
        (s, k) for s in ("SFT", "PPO", "MemOPD") for k in (1, 2)
    }
    for arm in ("ppo", "memopd"):
        lines = (work / f"q2/{arm}-0/metrics.jsonl").read_text().splitlines()
        assert [json.loads(text)["step"] for text in lines] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_that_cannot_train_is_named(tmp_path):
    broken = Work(load(Suite, folder() / "suite.toml"), tmp_path, (("ppo", 2),), overrides=(("model.student", "/no"),))
    failed = run_jobs(list(broken.training_jobs()), 2).failed
    assert set(failed) == {"train:ppo-0", "train:ppo-1"}
    assert all("there is no model here" in why for why in failed.values())
