"""Settings chosen on dev: the rule by hand, one choice after the other, and runs that are not trained twice."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small import command, write_result
from test_real_suite import LORA, shop

from memopd.evaluate import Estimate
from paper.__main__ import app
from paper.choices import smallest_within_error
from paper.evaluation import Part, measured_with
from paper.settings import Choices, Suite, check_choices, load
from paper.suite import Work, reuse

ROOT = Path(__file__).parents[2]
REAL = ROOT / "paper" / "real"

CHOICES = """
title = "Two choices"
training = "{folder}/training-lora.toml"
seeds = [0]
concurrent = 2
beside = ["student-mem1"]

[[choices]]
setting = "optimise.lr"
arms = ["slow", "fast"]

[[choices]]
setting = "teacher.weight"
arms = ["weak", "strong"]

[arms]
slow = {{ "teacher.state" = "none", "optimise.lr" = 1e-5 }}
fast = {{ "teacher.state" = "none", "optimise.lr" = 1e-4 }}
weak = {{ "teacher.weight" = 0.1 }}
strong = {{ "teacher.weight" = 0.5 }}

[evaluation]
tasks = "{folder}/world/tasks/{{split}}-q{{k}}.parquet"
index = "{folder}/world/index"
limit = 2
max_tokens = 8
max_context = 900
batch = 4
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "choices.toml"
    path.write_text(CHOICES.format(folder=shop()))
    return path


def write_scores(file: Path, work: Path, scores: dict[str, list[float]]) -> None:
    """What evaluations on dev would have written: the F1 of every task."""
    made = Work(load(Choices, file), work, (), "dev")
    for system, f1 in scores.items():
        settings = measured_with(Part(system, 0, 2, "mem1", made.tasks_of("", 2), ""), made.suite.evaluation)
        write_result(made.result_of(system, 0, 2), system, 0, 2, [(0.0, one) for one in f1], settings)


def collected(file: Path, folder: Path) -> tuple[str, dict, str]:
    words = ("choices", "--config", file, "--work", folder / "work", "--output", folder / "out", "--collect")
    output = command(app, *words)
    made = json.loads((folder / "out" / "choices.json").read_text())
    return output, made, (folder / "out" / "choices.md").read_text()


def test_the_smallest_value_within_one_standard_error_of_the_best():
    def chosen(**scores: tuple[float, float]) -> float:
        return smallest_within_error({float(v): Estimate(*score, 450) for v, score in scores.items()})

    assert chosen(**{"1": (0.70, 0.02), "2": (0.80, 0.03), "3": (0.75, 0.09)}) == 2  # 0.75 and 0.70 are too far
    assert chosen(**{"1": (0.76, 0.02), "2": (0.78, 0.03), "3": (0.80, 0.03)}) == 2  # not 1: it is 0.04 below the best
    assert chosen(**{"3": (0.80, 0.03), "1": (0.7701, 0.001)}) == 1
    assert chosen(**{"5": (0.5, 0.1)}) == 5


def test_the_second_choice_is_made_with_the_value_of_the_first(file, tmp_path):
    """F1 0.9 ± 0.1 against 0.5; then 1.4 ± 0.1 against 1.5 ± 0.2, which is within its standard error."""
    scores = {"slow": [0.4, 0.6], "fast": [0.8, 1.0], "weak": [1.3, 1.5], "strong": [1.3, 1.7], "student-mem1": [0, 1]}
    write_scores(file, tmp_path / "work", scores)
    output, made, page = collected(file, tmp_path)
    assert "optimise.lr: 0.0001\nteacher.weight: 0.1\n" in output
    assert [(c["setting"], c["value"], c["with"]) for c in made["choices"]] == [
        ("optimise.lr", 1e-4, {}),
        ("teacher.weight", 0.1, {"optimise.lr": "0.0001"}),
    ]
    assert "| **0.0001** | 0.000 ± 0.000 | 0.900 ± 0.100 |" in page
    assert "| 1e-05 | 0.000 ± 0.000 | 0.500 ± 0.100 |" in page
    assert "With optimise.lr = 0.0001. Chosen: **0.1**. training.toml has 0.02: enter the choice." in page
    assert page.count("| SFT |") == 2
    assert (tmp_path / "out" / "choices.png").stat().st_size > 1000
    assert made["missing"] == []


def test_without_all_results_nothing_is_chosen_and_later_choices_wait(file, tmp_path):
    write_scores(file, tmp_path / "work", {"fast": [0.8, 1.0], "weak": [1.3, 1.5], "strong": [1.3, 1.7]})
    output, made, page = collected(file, tmp_path)
    assert "optimise.lr: not chosen yet" in output
    assert "teacher.weight" not in output
    assert len(made["choices"]) == 1
    assert made["missing"] == ["slow, Q2", "SFT, Q2"]
    assert "Not chosen yet" in page
    with pytest.raises(ValueError, match="there is no result yet; run the experiment without --collect"):
        command(app, "choices", "--config", file, "--work", tmp_path / "none", "--output", tmp_path / "o", "--collect")


def test_a_choice_needs_a_value_from_each_of_its_arms(file):
    check_choices(load(Choices, file), "here")
    file.write_text(file.read_text().replace('weak = { "teacher.weight" = 0.1 }', "weak = {}"))
    with pytest.raises(ValueError, match=r"here: arm 'weak' must have a value for teacher\.weight"):
        check_choices(load(Choices, file), "here")


def test_the_shipped_choices_have_the_values_of_the_plan():
    choices = load(Choices, REAL / "choices.toml")
    check_choices(choices, "choices.toml")
    values = [[choices.arms[arm][choice.setting] for arm in choice.arms] for choice in choices.choices]
    assert values == [[3e-5, 1e-4, 3e-4], [0.02, 0.1, 0.5]]
    suite = load(Suite, REAL / "suite.toml")
    assert choices.training == suite.training
    assert replace(choices.evaluation, samples=1) == suite.evaluation


def test_a_finished_run_with_an_arms_settings_is_taken_over(tmp_path):
    """The run that chose the learning rate is the arm of seed 0, once that rate is entered."""
    training = tmp_path / "training.toml"
    training.write_text((shop() / "training-lora.toml").read_text())
    assert LORA in training.read_text()
    choices = Suite(str(training), {"ppo-fast": {"teacher.state": "none", "optimise.lr": 1e-4}}, (0,))
    suite = Suite(str(training), {"ppo": {"teacher.state": "none"}}, (0, 1))
    chosen = Work(choices, tmp_path / "work", (("ppo-fast", 2),))
    work = Work(suite, tmp_path / "work", (("ppo", 2),))
    done = chosen.run_of("ppo-fast", 0)
    (done / "adapter").mkdir(parents=True)
    (done / "config.json").write_text(chosen.config_of("ppo-fast", 0).as_json())
    (done / "metrics.jsonl").write_text("{}\n")
    (done / "adapter" / "adapter_config.json").write_text("its adapter")
    reuse(work)
    assert not work.run_of("ppo", 0).exists()  # training.toml has another learning rate
    entered = replace(work, overrides=(("optimise.lr", "1e-4"),))
    reuse(entered)
    assert (work.run_of("ppo", 0) / "adapter" / "adapter_config.json").read_text() == "its adapter"
    assert [job.name for job in entered.training_jobs() if job.finished()] == ["train:ppo-0"]
    assert not work.run_of("ppo", 1).exists()
    assert not any(path.name.startswith(".") for path in (tmp_path / "work" / "q2").iterdir())


SFT = """
[lora]
rank = 4
alpha = 8

[sft]
start = "{folder}/model"
episodes = ["{folder}/world/oracle/train/mem1/q1.parquet"]
tokens = 4000
batch = 2000

[run]
dev_every = 0
"""


@pytest.mark.slow
def test_the_command_trains_evaluates_and_chooses(file, tmp_path, monkeypatch):
    """Real runs of a tiny model, SFT first. A second command finds everything and chooses the same."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "sft.toml").write_text(SFT.format(folder=shop()))
    runs = {name: tmp_path / name for name in ("start", "guide")}
    training = (shop() / "training-lora.toml").read_text()
    for name, run in runs.items():
        training = training.replace(f"{shop()}/{name}", f"{run}/adapter")
    (tmp_path / "training.toml").write_text(training)
    starts = "\n".join(f'"{run}" = "{tmp_path}/sft.toml"' for run in runs.values())
    text = file.read_text().replace(f"{shop()}/training-lora.toml", f"{tmp_path}/training.toml")
    file.write_text(f"{text}\n[starts]\n{starts}\n")
    words = ("choices", "--config", file, "--work", tmp_path / "work", "--output", tmp_path / "out")
    first = command(app, *words)
    made = json.loads((tmp_path / "out" / "choices.json").read_text())
    assert [choice["value"] is not None for choice in made["choices"]] == [True, True]
    assert (made["missing"], made["inputs"]["tasks"] != []) == ([], True)
    second = made["choices"][1]
    config = json.loads((tmp_path / "work" / "q2" / "weak-0" / "config.json").read_text())
    assert config["optimise"]["lr"] == float(second["with"]["optimise.lr"]) == made["choices"][0]["value"]
    assert second["curves"]["weak"]["0"]["dev_f1"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}
    assert command(app, *words) == first
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "work").rglob("*.safetensors")}


def test_what_dev_chooses_leaves_the_runs_without_a_teacher_as_they_are():
    """Whatever λ is entered, PPO with the chosen rate is the arm of seed 0."""
    choices, suite = load(Choices, REAL / "choices.toml"), load(Suite, REAL / "suite.toml")
    probed = Work(choices, ROOT / "none", ())
    for weight in ("0.02", "0.1", "0.5"):
        entered = Work(suite, ROOT / "none", (), overrides=(("teacher.weight", weight), ("optimise.lr", "3e-4")))
        assert entered.config_of("ppo", 0) == probed.config_of("ppo-3e-4", 0)
        with_rate = replace(probed, overrides=(("optimise.lr", "3e-4"),))
        assert entered.config_of("memopd", 0) == with_rate.config_of(f"memopd-{weight}", 0)


def test_choices_run_by_themselves(file):
    for option in (("--only", "train:slow-0"), ("--arms", "slow"), ("--seeds", "0"), ("--split", "dev")):
        with pytest.raises(ValueError, match=f"{option[0]}: choices trains its own arms"):
            command(app, "choices", "--config", file, *option)


def test_two_arms_of_one_value_are_refused(file):
    file.write_text(
        file.read_text().replace('strong = { "teacher.weight" = 0.5 }', 'strong = { "teacher.weight" = 0.1 }')
    )
    with pytest.raises(ValueError, match=r"here: two arms have the same value for teacher\.weight"):
        check_choices(load(Choices, file), "here")
