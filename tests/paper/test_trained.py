"""Tables against numbers worked out by hand from given results."""

import json
from dataclasses import replace

import pytest
from small import write_result
from typer.testing import CliRunner

from memopd.config import load_config
from memopd.evaluate.provenance import identity
from paper.__main__ import app
from paper.evaluation import Part, measured_with
from paper.settings import Shown, Suite
from paper.suite import Work
from paper.trained import rewritten, show

ARMS = {"ppo": {"teacher.state": "none"}, "memopd": {"teacher.state": "aligned"}}
SYSTEMS = ("student-mem1", "ppo", "memopd")
SHOWN = Shown(
    "Two systems", horizons=(2,), systems=SYSTEMS, compare=(("memopd", "ppo"), ("memopd", "student-mem1")),
    differs="Ours are smaller.",
)  # fmt: skip
SCORES = {  # EM and F1 of two tasks
    ("student-mem1", 0): [(0.0, 0.5), (1.0, 1.5)],
    ("ppo", 0): [(0.0, 1.0), (1.0, 1.0)],
    ("ppo", 1): [(1.0, 1.0), (1.0, 2.0)],
    ("memopd", 0): [(1.0, 1.0), (2.0, 2.0)],
    ("memopd", 1): [(2.0, 2.0), (1.0, 2.0)],
}


@pytest.fixture
def work(tmp_path):
    wanted = tuple((s, 2) for s in SYSTEMS)
    made = Work(Suite(seeds=(0, 1), arms=ARMS), tmp_path / "work", wanted)
    for (system, seed), scores in SCORES.items():
        part = Part(system, seed, 2, "mem1", "runs/world/tasks/test-q2.parquet", "")
        settings = measured_with(part, made.suite.evaluation)
        write_result(made.result_of(system, seed, 2), system, seed, 2, scores, settings)
    return made


def read(tmp_path, name="main"):
    return json.loads((tmp_path / f"{name}.json").read_text()), (tmp_path / f"{name}.md").read_text()


def test_numbers_by_hand(work, tmp_path):
    show("main", SHOWN, work, {}, tmp_path)
    made, text = read(tmp_path)
    f1 = {r["system"]: r["metrics"]["f1"] for r in made["results"]}
    # One run: 0.5 and 1.5, mean 1, s = 0.7071, standard error 0.5. Seeds: means of 1 and 1.5; of 1.5 and 2.
    assert f1["SFT"] == {"mean": 1.0, "spread": pytest.approx(0.5), "n": 2}
    assert f1["PPO"] == {"mean": 1.25, "spread": pytest.approx(0.125**0.5), "n": 2}
    assert f1["MemOPD"] == {"mean": 1.75, "spread": pytest.approx(0.125**0.5), "n": 2}
    assert "| PPO | 0.750 ± 0.354 | 1.250 ± 0.354 | 4.50 ± 0.00 |\n" in text
    assert "| SFT | 0.500 ± 0.500 | 1.000 ± 0.500 | 4.50 ± 0.50 |\n" in text
    assert "Time is not shown, because trajectories waited for each other: up to 256 at once, local, test" in text
    ahead = next(c for c in made["comparisons"] if c["metric"] == "f1" and c["b"] == "PPO")
    assert ahead["difference"] == 0.5
    assert ahead["relative"] == pytest.approx(0.4)
    assert ahead["over_seeds"]["differences"] == [0.5, 0.5]
    assert ahead["over_tasks"]["difference"] == 0.5  # t0: 1.5 - 1, t1: 2 - 1.5
    assert ahead["over_tasks"]["tasks"] == 2
    fixed = next(c for c in made["comparisons"] if c["metric"] == "f1" and c["b"] == "SFT")
    assert fixed["over_seeds"]["differences"] == [0.5, 1.0]  # every seed against the one run
    assert made["missing"] == []
    assert "Ours are smaller." in text
    assert (tmp_path / "main.png").stat().st_size > 1000


def test_time_is_shown_where_trajectories_run_one_at_a_time(work, tmp_path):
    alone = replace(work, suite=replace(work.suite, evaluation=replace(work.suite.evaluation, batch=1)))
    for file in alone.folder.glob("evaluations/test/*.json"):
        found = json.loads(file.read_text())
        file.write_text(json.dumps(found | {"settings": found["settings"] | {"batch": 1}}))
    show("main", SHOWN, alone, {}, tmp_path)
    text = read(tmp_path)[1]
    assert "| PPO | 0.750 ± 0.354 | 1.250 ± 0.354 | 4.50 ± 0.00 | 2.00 ± 0.00 |" in text
    assert "Time is wall time of a trajectory, one at a time: local, test." in text


def test_a_page_has_the_settings_of_its_training_and_costs_both_ways(work, tmp_path):
    show("main", SHOWN, work, {}, tmp_path)
    made, text = read(tmp_path)
    assert made["settings"]["trained_with"] == json.loads(load_config(work.suite.training).as_json())
    assert "trained by grpo (group advantages, no critic) with learning rate 3e-05, sampled at temperature 1" in text
    assert "the teacher has λ = 1." in text
    # Two tasks, peaks of 400 and 500, 200 without q; dependency without q was not recorded.
    assert "| SFT | 2 | 100.0 ± 0.0 | 4.50 ± 0.50 | 2.00 ± 0.00 | 2.00 | 0.500 ± 0.000 |" in text  # EM 0 is dropped
    assert "Not recorded in these runs: dependency without q ↓ ×10⁵." in text
    assert made["commit"] is None or f"commit {made['commit'][:12]}" in text


def test_a_page_is_made_again_from_its_json_alone(work, tmp_path):
    for name in ("main", "single", "control"):
        show(name, SHOWN, work, {}, tmp_path)
        made, text = read(tmp_path, name)
        changed = replace(SHOWN, differs="Other words.")
        rewritten(name, changed, tmp_path)
        again, reworded = read(tmp_path, name)
        assert again == made | {"differs": "Other words."}
        assert reworded == text.replace("Ours are smaller.", "Other words.")
    with pytest.raises(ValueError, match=r"other\.json: there is no result yet"):
        rewritten("other", SHOWN, tmp_path)


def test_a_result_of_tasks_that_changed_is_not_used(work, tmp_path):
    tasks = tmp_path / "tasks.parquet"
    tasks.write_text("before")
    file = work.result_of("memopd", 1, 2)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"inputs": {"tasks": identity(tasks)}}))
    show("main", SHOWN, work, {}, tmp_path)
    made, _ = read(tmp_path)
    assert (made["missing"], made["inputs"]) == ([], {"tasks": [identity(tasks)]})
    tasks.write_text("after")
    show("main", SHOWN, work, {}, tmp_path)
    assert read(tmp_path)[0]["missing"] == [
        f"MemOPD, seed 1, Q2 (the existing result is of another version of {tasks})"
    ]


def test_long_tasks_show_how_many_answers_count(work, tmp_path):
    """SFT: one valid answer of two, F1 0 and 3, so 50 % and 3 / 1. MemOPD: none."""
    shown = replace(SHOWN, horizons=(2, 8), compare=())
    for system, scores in (("student-mem1", [(0.0, 0.0), (2.0, 3.0)]), ("memopd", [(0.0, 0.0), (0.0, 0.0)])):
        part = Part(system, 0, 8, "mem1", "runs/world/tasks/test-q8.parquet", "")
        file = work.result_of(system, 0, 8)
        write_result(file, system, 0, 8, scores, measured_with(part, work.suite.evaluation))
        found = json.loads(file.read_text())
        for measure in found["measures"]:
            measure["valid"] = measure["f1"] > 0
        file.write_text(json.dumps(found))
    show("main", shown, work, {}, tmp_path)
    text = read(tmp_path)[1].partition("## Answers that count")[2]
    assert "| SFT | 100.0 | 1.00 | 50.0 | 3.00 |" in text
    assert "| PPO | 100.0 | 1.25 | – | – |" in text
    assert "| MemOPD | 100.0 | 1.75 | 0.0 | – |" in text
    show("control", SHOWN, work, {}, tmp_path)
    assert "Answers that count" not in read(tmp_path, "control")[1]


def test_single_has_dependency_and_control_has_curves(work, tmp_path):
    show("single", SHOWN, work, {}, tmp_path)
    assert "| 0.500 ± 0.000 |" in read(tmp_path, "single")[1]  # 50,000 in 10⁵
    for arm in ("ppo", "memopd"):
        for seed in (0, 1):
            run = work.run_of(arm, seed)
            run.mkdir(parents=True)
            lines = [{"step": s, "reward": 0.1 * s, "dev_em": 0.5 if s == 2 else None} for s in range(3)]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    show("control", SHOWN, work, {}, tmp_path)
    curves = read(tmp_path, "control")[0]["curves"]
    assert curves["ppo"]["1"]["reward"] == [[1, 0.0], [2, 0.1], [3, 0.2]]
    assert curves["ppo"]["1"]["dev_em"] == [[3, 0.5]]


COLLECTED = """
title = "Two systems"
suite = "{folder}/suite.toml"
systems = ["student-mem1", "ppo", "memopd"]
compare = [["memopd", "ppo"]]
"""


def test_the_command_makes_tables_of_what_is_there(work, tmp_path):
    (tmp_path / "suite.toml").write_text("seeds = [0, 1]\n[arms.ppo]\n\"teacher.state\" = 'none'\n[arms.memopd]\n")
    (tmp_path / "main.toml").write_text(COLLECTED.format(folder=tmp_path))
    places = ["--config", tmp_path / "main.toml", "--work", work.folder, "--output", tmp_path / "out"]
    done = CliRunner().invoke(app, ["main", *map(str, places), "--collect"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.stdout.split() == [str(tmp_path / "out" / f"main{suffix}") for suffix in (".json", ".md", ".png")]
    made, text = read(tmp_path / "out")
    assert "| MemOPD − PPO | Q2 F1 | +0.500 | +40.0 % | 2 of 2 |" in text
    assert made["command"].startswith("python -m paper")
    for file in work.folder.rglob("*.json"):
        file.unlink()
    again = CliRunner().invoke(app, ["main", *map(str, places), "--collect"], catch_exceptions=False)
    assert again.stdout.split() == [str(tmp_path / "out" / f"main{suffix}") for suffix in (".json", ".md")]
    assert read(tmp_path / "out") == (made, text)
    two = CliRunner().invoke(app, ["main", "single", *map(str, places)])
    assert "--config belongs to one experiment" in str(two.exception)


def test_what_is_missing_is_said_and_left_out(work, tmp_path):
    work.result_of("ppo", 1, 2).unlink()
    other = work.result_of("memopd", 1, 2)
    found = json.loads(other.read_text())
    found["settings"]["temperature"] = 0.5
    other.write_text(json.dumps(found))
    show("main", SHOWN, work, {"train ppo-1": "out of memory"}, tmp_path)
    made, text = read(tmp_path)
    assert made["missing"][0] == "PPO, seed 1, Q2"
    assert made["missing"][1] == "MemOPD, seed 1, Q2 (the existing result has another temperature)"
    assert made["missing"][2] == "train ppo-1 failed: out of memory"
    assert "| MemOPD | 1.500 ± 0.500 |" in text  # one run is left: standard error over its tasks
    assert "Missing" in text


def test_an_untrained_system_can_have_seeds_too(work, tmp_path):
    """Sampled with every seed, it is compared pair by pair: 1.5 - 1 and 2 - 0.5."""
    found = json.loads(work.result_of("student-mem1", 0, 2).read_text())
    write_result(
        work.result_of("student-mem1", 1, 2), "student-mem1", 1, 2, [(0.0, 0.0), (0.0, 1.0)], found["settings"]
    )
    show("main", SHOWN, replace(work, suite=replace(work.suite, repeated=("student-mem1",))), {}, tmp_path)
    lines = read(tmp_path)[0]["comparisons"]
    fixed = next(c for c in lines if c["metric"] == "f1" and c["b"] == "SFT")
    assert fixed["over_seeds"]["differences"] == [0.5, 1.5]


def test_nothing_at_all(work, tmp_path):
    for file in work.folder.rglob("*.json"):
        file.unlink()
    with pytest.raises(ValueError, match="there is no result yet"):
        show("main", SHOWN, work, {}, tmp_path)
