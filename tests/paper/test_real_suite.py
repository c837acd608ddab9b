"""What `paper/real` needs, on a tiny model: arms with adapters and their own rewards, data sets, conventions."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from random_adapter import write_random
from small import folder, write_result
from typer.testing import CliRunner

from memopd.agent.protocol import user_message
from memopd.config import load_config
from memopd.tasks.files import read_tasks, write_tasks
from memopd.train.metrics import read_metrics
from memopd.train.train import train
from paper.__main__ import app
from paper.comparisons import grows, growth, order_row, orders, shorter
from paper.evaluation import Part, evaluate, fingerprint, is_made, measured_with, read_plan, together
from paper.jobs import Made
from paper.settings import Recorded, Shown, Suite, check_systems, load
from paper.suite import Work, make
from paper.trained import label, rewritten, show

ROOT = Path(__file__).parents[2]
REAL = ROOT / "paper" / "real"

LORA = """
[lora]
rank = 4
alpha = 8
"""
SUITE = """
training = "{folder}/training-lora.toml"
seeds = [0, 1]
concurrent = 2

[arms]
ppo = {{ "teacher.state" = "none" }}
memopd = {{ "teacher.state" = "aligned", "teacher.weight" = 0.5 }}

[arms.teacher-only]
"teacher.state" = "aligned"
"tasks.reward" = "paper.rewards:nothing"
"optimise.reference" = 0.0

[evaluation]
tasks = "{folder}/world/tasks/{{split}}-{{data}}-q{{k}}.parquet"
data = ["a", "b"]
index = "{folder}/world/index"
max_tokens = 8
max_context = 900
batch = 4
dtype = "bfloat16"

[conventions.cold]
temperature = 0.01
top_p = 0.95
"""


@cache
def shop() -> Path:
    """Adapters of the tiny model for student and teacher, and its tasks as two data sets."""
    made = folder()
    for seed, name in enumerate(("start", "guide")):
        write_random(made / name, made / "model", seed)
    text = (made / "training.toml").read_text()
    named = f'[model]\nadapter = "{made}/start"\nteacher_adapter = "{made}/guide"'
    text = (
        text.replace("[model]", named)
        .replace('algorithm = "grpo"', 'algorithm = "ppo"')
        .replace("steps = 4", "steps = 2")
    )
    (made / "training-lora.toml").write_text(text + LORA)
    (made / "suite-lora.toml").write_text(SUITE.format(folder=made))
    for k in (1, 2):
        tasks = read_tasks(made / "world" / "tasks" / f"test-q{k}.parquet")
        for data, part in (("a", tasks[:3]), ("b", tasks[3:5])):
            write_tasks(made / "world" / "tasks" / f"test-{data}-q{k}.parquet", part, user_message)
    return made


@pytest.fixture
def work(tmp_path):
    wanted = (("teacher-mem1", 1), ("student-mem1", 1), ("ppo", 1), ("memopd", 1), ("teacher-only", 1))
    return Work(load(Suite, shop() / "suite-lora.toml"), tmp_path / "work", wanted)


# ---- settings


def test_every_shipped_file_loads():
    suite = load(Suite, REAL / "suite.toml")
    assert list(suite.arms)[:5] == ["ppo", "memopd", "memopd-0.02", "persistent", "teacher-only"]
    assert suite.seeds == (0, 1, 2)
    for run, config in suite.starts.items():
        assert load_config(config).sft.episodes
        assert f"{run}/adapter" in Path(suite.training).read_text()
    for name in ("main", "control", "single", "long", "groups", "memories"):
        shown = load(Shown, REAL / f"{name}.toml")
        check_systems(shown, suite, name)
        assert {*shown.claims, *shown.grows, *shown.shorter} <= set(shown.compare)
        assert {s for pair in shown.compare for s in pair} <= set(shown.systems)
        assert all(len(row) == len(shown.paper.columns) for row in shown.paper.rows)
    for name in ("state", "rules", "corruption", "domain", "packing"):
        recorded = load(Recorded, REAL / f"{name}.toml")
        assert recorded.adapter
        assert all(len(row) == len(recorded.paper.columns) for row in recorded.paper.rows)


def test_the_arms_of_a_suite_differ_in_what_they_name_alone():
    suite = load(Suite, REAL / "suite.toml")
    work = Work(suite, Path("nowhere"), tuple((arm, 2) for arm in suite.arms))
    common = load_config(suite.training)
    assert common.optimise.tasks * common.optimise.samples == 128
    assert (common.optimise.algorithm, common.lora.rank, common.lora.alpha, common.tasks.reward) == ("ppo", 8, 16, "f1")
    weights = {arm: work.config_of(arm, 0).teacher.weight for arm in suite.arms}
    assert weights["memopd"] == weights["persistent"] == weights["teacher-only"] == common.teacher.weight
    assert weights["memopd-0.02"] == 0.02
    assert work.config_of("persistent", 0).teacher.state == "persistent"
    memopd, persistent = (work.config_of(arm, 2) for arm in ("memopd", "persistent"))
    assert replace(persistent, teacher=memopd.teacher) == memopd
    alone = work.config_of("teacher-only", 0)
    assert (alone.tasks.reward, alone.optimise.reference) == ("paper.rewards:nothing", 0)


# ---- training


def test_without_reward_and_penalty_every_advantage_is_zero(work, tmp_path):
    """With the penalty, advantages are not zero after the first update: whitening would scale them up to 1."""
    config = work.config_of("teacher-only", 0)
    train(config, tmp_path / "alone")
    lines = read_metrics(tmp_path / "alone")
    assert [(line["reward"], line["advantage_std"]) for line in lines] == [(0, 0), (0, 0)]
    assert all(line["loss_opd"] > 0 for line in lines)
    start, end = (
        fingerprint(shop() / "model", str(path)) for path in (shop() / "start", tmp_path / "alone" / "adapter")
    )
    assert None not in (start, end)
    assert start != end
    penalised = replace(config, optimise=replace(config.optimise, reference=0.001, lr=1e-2))
    train(penalised, tmp_path / "penalised")
    assert read_metrics(tmp_path / "penalised")[1]["advantage_std"] > 0


def test_a_run_is_finished_with_its_adapter(work):
    job = next(job for job in work.training_jobs() if job.name == "train:memopd-1")
    run = work.run_of("memopd", 1)
    (run / "adapter").mkdir(parents=True)
    (run / "config.json").write_text(work.config_of("memopd", 1).as_json())
    assert not job.finished()
    assert "--teacher.weight=0.5" in job.command()
    (run / "adapter" / "adapter_config.json").touch()
    assert job.finished()


def test_what_arms_start_from_is_trained_first(tmp_path):
    """Whoever reads an adapter waits for its training, an arm without a teacher not for the teacher's."""
    start, guide = tmp_path / "start", tmp_path / "guide"
    wanted = (("teacher-mem1", 1), ("student-mem1", 1), ("ppo", 1), ("memopd", 1))
    suite = replace(load(Suite, shop() / "suite-lora.toml"), seeds=(0,), conventions={})
    suite = replace(suite, starts={str(start): "student.toml", str(guide): "teacher.toml"})
    named = {"model.adapter": f"{start}/adapter", "model.teacher_adapter": f"{guide}/adapter"}
    work = Work(suite, tmp_path / "work", wanted, overrides=tuple(named.items()))
    assert {job.name: job.needs for job in work.jobs()} == {
        "sft:start": (), "sft:guide": (), "train:ppo-0": ("sft:start",), "train:memopd-0": ("sft:start", "sft:guide"),
        "evaluate:student-0": ("sft:start",), "evaluate:teacher-0": ("sft:guide",),
        "evaluate:ppo-0": (), "evaluate:memopd-0": (),
    }  # fmt: skip
    job = work.jobs()[0]
    assert job.command()[-4:] == ["sft", "student.toml", "--output", str(start)]
    assert not job.finished()
    (start / "adapter").mkdir(parents=True)
    assert job.command()[-1] == "--resume"
    (start / "adapter" / "adapter_config.json").touch()
    assert job.finished()
    only_ppo = replace(work, wanted=(("ppo", 1),))
    assert [job.name for job in only_ppo.jobs()] == ["sft:start", "train:ppo-0", "evaluate:ppo-0"]
    run = work.run_of("ppo", 0)
    (run / "adapter").mkdir(parents=True)
    (run / "config.json").write_text(only_ppo.config_of("ppo", 0).as_json())
    (run / "adapter" / "adapter_config.json").touch()
    assert [job.name for job in only_ppo.jobs()] == ["train:ppo-0", "evaluate:ppo-0"]  # nobody needs the start now


# ---- evaluation


def test_a_base_with_an_adapter_is_evaluated_on_all_data_sets(work, tmp_path):
    plans = dict(work.plans())
    assert list(plans) == [
        "student-0", "teacher-0", "ppo-0", "memopd-0", "teacher-only-0", "ppo-1", "memopd-1", "teacher-only-1",
    ]  # fmt: skip
    assert (plans["student-0"].adapter, plans["teacher-0"].adapter) == (f"{shop()}/start", f"{shop()}/guide")
    plan = plans["memopd-1"]
    assert (plan.model, plan.adapter) == (f"{shop()}/model", str(work.run_of("memopd", 1) / "adapter"))
    assert not plan.exists
    shutil.copytree(shop() / "start", plan.adapter)
    assert plan.exists
    assert [Path(part.output).name for part in plan.parts] == ["memopd-1-a-q1.json", "memopd-1-b-q1.json"]
    (tmp_path / "plan.json").write_text(plan.as_json())
    assert read_plan(tmp_path / "plan.json") == plan
    evaluate(plan)
    assert all(is_made(plan, part) for part in plan.parts)
    found = json.loads(Path(plan.parts[1].output).read_text())
    assert (found["data"], len(found["measures"]), found["adapter"]) == ("b", 2, plan.adapter)
    assert found["inputs"].keys() == {"model", "adapter", "tasks", "index"}
    shutil.rmtree(plan.adapter)
    assert is_made(plan, plan.parts[0])  # results outlive the adapter
    shutil.copytree(shop() / "guide", plan.adapter)
    assert not is_made(plan, plan.parts[0])  # but are not those of another


def test_parts_share_the_batches_and_have_the_results_of_each_alone(work, tmp_path):
    plan = dict(replace(work, wanted=(("student-mem1", 1), ("student-mem1", 2))).plans())["student-0"]
    precise = replace(plan, settings=replace(plan.settings, dtype="float32", samples=2))
    (group,) = together(plan.parts, plan.settings)
    assert [(part.k, part.data) for part in group] == [(2, "a"), (2, "b"), (1, "a"), (1, "b")]  # the longest first
    evaluate(precise)
    for part in plan.parts:
        alone = replace(part, output=str(tmp_path / "alone.json"))
        evaluate(replace(precise, parts=(alone,)))
        pooled, single = (
            {
                (m["task"], m["em"], m["f1"], m["calls"], m["peak"], m["dependency"])
                for m in json.loads(text)["measures"]
            }
            for text in (Path(part.output).read_text(), Path(alone.output).read_text())
        )
        assert pooled == single
        assert pooled
        Path(alone.output).unlink()


def test_parts_of_other_seeds_rules_or_of_the_same_tasks_are_played_by_themselves(work):
    part = dict(work.plans())["student-0"].parts[0]
    others = [replace(part, seed=1), replace(part, memory="truncate"), replace(part, output="again")]
    groups = list(together([part, *others], work.suite.evaluation))
    assert [list(group) for group in groups] == [[part], *([other] for other in others)]


def test_an_adapter_of_another_base_has_another_fingerprint(tmp_path):
    shutil.copytree(shop() / "model", tmp_path / "model")
    adapter = str(shop() / "start")
    before = fingerprint(tmp_path / "model", adapter)
    assert before == fingerprint(shop() / "model", adapter)
    assert before not in (fingerprint(tmp_path / "model"), fingerprint(tmp_path / "model", str(shop() / "guide")))
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert fingerprint(tmp_path / "model", adapter) != before
    assert fingerprint(tmp_path / "model", str(tmp_path)) is None


def test_conventions_sample_otherwise_with_their_seeds_alone(work):
    names = [job.name for job in work.jobs()]
    assert names[:3] == ["train:ppo-0", "train:memopd-0", "train:teacher-only-0"]
    assert [name for name in names if name.endswith(":cold")] == [
        f"evaluate:{who}-0:cold" for who in ("student", "teacher", "ppo", "memopd", "teacher-only")
    ]
    plan = dict(work.under("cold").plans())["ppo-0"]
    assert (plan.settings.temperature, plan.settings.top_p) == (0.01, 0.95)
    assert Path(plan.parts[0].output).parent.name == "test-cold"
    assert measured_with(plan.parts[0], plan.settings)["top_p"] == 0.95
    assert "top_p" not in measured_with(plan.parts[0], work.suite.evaluation)


def test_only_named_jobs_run(work, monkeypatch):
    ran = []
    monkeypatch.setattr("paper.suite.run_jobs", lambda jobs, *_: ran.append([job.name for job in jobs]) or Made())
    make(work, ["train:memopd-0", "evaluate:teacher-0"])
    assert ran == [["train:memopd-0", "evaluate:teacher-0"]]
    with pytest.raises(ValueError, match="unknown job 'train:pop-0': choose from train:ppo-0, train:memopd-0"):
        make(work, ["train:pop-0"])


def test_the_command_chooses_the_version_and_its_jobs(tmp_path, monkeypatch):
    """`--of` chooses settings and suite; `--only` makes no tables, and an end of the time is no failure."""
    monkeypatch.chdir(ROOT)
    asked = []

    def made(parts, only, until):
        asked.append((parts, only, until))
        return Made(unfinished=["train:ppo-0"])

    def command(*words):
        return CliRunner().invoke(app, ["main", "control", "--work", str(tmp_path), *words])

    wrong = command("--of", "real", "--only", "train:pop-0")
    known = "sft:sft-student, sft:sft-teacher, train:ppo-0, train:memopd-0, train:memopd-0.02-0,"
    assert f"unknown job 'train:pop-0': choose from {known}" in str(wrong.exception)
    monkeypatch.setattr("paper.suite.make", made)
    before = time.monotonic()
    done = command("--of", "real", "--only", "train:ppo-0,evaluate:ppo-0", "--concurrent", "3", "--minutes", "9")
    assert (done.exit_code, done.stdout) == (0, "not finished: train:ppo-0\n")
    parts, only, until = asked[0]
    assert (parts.suite.training, parts.suite.concurrent) == ("paper/real/training.toml", 3)
    assert only == ["train:ppo-0", "evaluate:ppo-0"]
    assert 540 <= until - before < 600
    command("--of", "world", "--only", "train:ppo-0")
    assert asked[1][0].suite.training == "paper/world/training.toml"
    monkeypatch.setattr("paper.suite.make", lambda *_: Made(failed={"train:ppo-0": "out of memory"}))
    assert command("--of", "real", "--only", "train:ppo-0").exit_code == 1


# ---- tables

SHOWN = Shown(
    "Two data sets", horizons=(2, 8), systems=("student-mem1", "ppo", "memopd"),
    compare=(("memopd", "ppo"),), claims=(("memopd", "ppo"),),
)  # fmt: skip
F1 = {  # of two tasks of each data set
    ("student-mem1", 0, "a", 2): (0.0, 1.0), ("student-mem1", 0, "b", 2): (1.0, 2.0),
    ("ppo", 0, "a", 2): (1.0, 1.0), ("ppo", 0, "b", 2): (1.0, 2.0),
    ("ppo", 1, "a", 2): (1.0, 1.0), ("ppo", 1, "b", 2): (2.0, 2.0),
    ("memopd", 0, "a", 2): (1.5, 1.5), ("memopd", 0, "b", 2): (1.0, 1.5),
    ("memopd", 1, "a", 2): (1.5, 2.0), ("memopd", 1, "b", 2): (2.0, 1.0),
    ("ppo", 0, "a", 8): (2.0, 2.0), ("ppo", 0, "b", 8): (2.0, 2.0),
    ("memopd", 0, "a", 8): (6.0, 6.0), ("memopd", 0, "b", 8): (4.0, 4.0),
    ("ppo", 1, "a", 8): (2.0, 2.0), ("ppo", 1, "b", 8): (4.0, 4.0),
    ("memopd", 1, "a", 8): (6.0, 6.0), ("memopd", 1, "b", 8): (6.0, 6.0),
}  # fmt: skip


@pytest.fixture
def measured(tmp_path):
    suite = load(Suite, shop() / "suite-lora.toml")
    made = Work(suite, tmp_path / "work", tuple((s, k) for s in SHOWN.systems for k in SHOWN.horizons))
    for (system, seed, data, k), scores in F1.items():
        for of in (made, made.under("cold")):
            if seed in of.suite.seeds:
                part = Part(system, seed, k, "mem1", of.tasks_of(data, k), "")
                file = of.result_of(system, seed, k, data)
                settings = measured_with(part, of.suite.evaluation)
                write_result(file, system, seed, k, [(0.0, f1) for f1 in scores], settings)
                found = json.loads(file.read_text())
                for i, measure in enumerate(found["measures"]):
                    measure |= {"task": f"{data}{i}", "peak": 300 if system == "memopd" else 400}
                file.write_text(json.dumps(found))
    return made


def page(tmp_path):
    return json.loads((tmp_path / "main.json").read_text()), (tmp_path / "main.md").read_text()


def test_data_sets_each_and_together(measured, tmp_path):
    show("main", SHOWN, measured, {}, tmp_path)
    made, text = page(tmp_path)

    def f1(numbers, k):
        return {r["system"]: r["metrics"]["f1"]["mean"] for r in numbers["results"] if r["k"] == k}

    assert f1(made["data"]["a"], 2) == {"SFT": 0.5, "PPO": 1.0, "MemOPD": 1.625}
    assert f1(made["data"]["b"], 2) == {"SFT": 1.5, "PPO": 1.75, "MemOPD": 1.375}
    assert f1(made, 2) == {"SFT": 1.0, "PPO": 1.375, "MemOPD": 1.5}
    assert f1(made["conventions"]["cold"], 2) == {"SFT": 1.0, "PPO": 1.25, "MemOPD": 1.375}  # seed 0 alone
    peak = next(c for c in made["comparisons"] if c["metric"] == "peak" and c["k"] == 2)
    assert (peak["difference"], peak["over_tasks"]["low"], peak["over_tasks"]["high"]) == (-100, -100, -100)
    assert "| MemOPD − PPO | Q2 peak ×10² | -1.00 | -25.0 % | 2 of 2 |" in text  # less is ahead
    assert made["missing"][:2] == ["SFT, a, Q8", "SFT, b, Q8"]
    assert "SFT, b, Q8, sampled as in cold" in made["missing"]
    assert "## At temperature 0.01 and top-p 0.95, seed 0" in text
    rewritten("main", replace(SHOWN, differs="Other words."), tmp_path)
    again, reworded = page(tmp_path)
    assert again == made | {"differs": "Other words."}
    assert reworded == f"{text}\n## Why ours differ\n\nOther words.\n"


def test_orders_that_do_not_hold_come_first(measured, tmp_path):
    """On data set b PPO is above MemOPD at Q2; at Q8 all seeds agree, and tasks do not vary."""
    show("main", SHOWN, measured, {}, tmp_path)
    made, text = page(tmp_path)
    verdicts = {(o["data"], o["k"]): o["holds"] for o in made["orders"]}
    assert verdicts == {
        (None, 2): False,
        ("b", 2): False,
        (None, 8): True,
        ("a", 2): True,
        ("a", 8): True,
        ("b", 8): True,
    }
    assert [o["holds"] for o in made["orders"]] == sorted(o["holds"] for o in made["orders"])
    assert text.index("## Orders that do not hold") < text.index("| MemOPD above PPO | b | Q2 |")
    assert text.index("| MemOPD above PPO | b | Q2 |") < text.index("## Orders that hold") < text.index("## Results")


def line(k, differences, low=0.1):
    tasks = {"low": low, "high": 1.0}
    mean = sum(differences) / len(differences)
    return {
        "a": "MemOPD", "b": "PPO", "k": k, "metric": "f1", "seeds": list(range(len(differences))), "difference": mean,
        "relative": 0.1 * k, "over_tasks": tasks, "over_seeds": {"differences": differences},
    }  # fmt: skip


def test_growth_by_hand():
    """Per question 0.1, 0.2 at Q2 and 0.2, 0.4 at Q16: 0.1 and 0.2 more."""
    grown = growth([line(2, [0.2, 0.4]), line(16, [3.2, 6.4])])[0]
    assert grown["per_question"] == {2: pytest.approx(0.15), 16: pytest.approx(0.3)}
    assert grown["more_per_question"]["differences"] == pytest.approx((0.1, 0.2))
    assert grown["more_per_question"]["ahead"] == 2
    assert growth([line(2, [0.2, 0.4])]) == []


@pytest.mark.parametrize(
    ("differences", "low", "holds"), [([0.1, 0.2], 0.01, True), ([0.1, 0.2], -0.01, False), ([-0.1, 0.6], 0.01, False)]
)
def test_an_order_needs_every_seed_and_the_interval(differences, low, holds):
    made = orders([line(2, differences, low)], [("MemOPD", "PPO")])
    assert [o["holds"] for o in made] == [holds]
    assert orders([line(2, differences, low)], [("PPO", "MemOPD")]) == []


@pytest.mark.parametrize(("longest", "holds"), [([3.2, 6.4], True), ([3.2, 3.0], False), ([1.6, 3.2], False)])
def test_an_advantage_grows_in_every_seed_or_not(longest, holds):
    """Per question 0.1 and 0.2 at Q2; at Q16 0.2 and 0.4, then 0.2 and 0.19, then the same as at Q2."""
    made = growth([line(2, [0.2, 0.4]), line(8, [9.0, 9.0]), line(16, longest)])
    (verdict,) = grows(made, [("MemOPD", "PPO")], (2, 8, 16))
    assert verdict["holds"] == holds
    assert order_row(verdict)[1:3] == ["all", "Q2, Q16"]
    assert grows(made, [("PPO", "MemOPD")], (2, 8, 16)) == []
    assert grows(growth([line(2, [0.2, 0.4]), line(8, [9.0, 9.0])]), [("MemOPD", "PPO")], (2, 8, 16)) == []  # no Q16


@pytest.mark.parametrize(
    ("differences", "high", "holds"),
    [([-100.0, -50.0], -1.0, True), ([-100.0, -50.0], 1.0, False), ([-100.0, 10.0], -1.0, False)],
)
def test_a_shorter_context_needs_every_seed_and_the_interval(differences, high, holds):
    peak = line(16, differences) | {"metric": "peak", "over_tasks": {"low": -200.0, "high": high}}
    (verdict,) = shorter([peak, peak | {"k": 8}, peak | {"metric": "f1"}], [("MemOPD", "PPO")], 16)
    assert verdict["holds"] == holds
    mean = sum(differences) / 2
    assert order_row(verdict) == [
        "MemOPD below PPO in peak ×10²", "all", "Q16", f"{mean / 100:+.2f}", f"-2.00 to {high / 100:+.2f}",
        f"{sum(d < 0 for d in differences)} of 2",
    ]  # fmt: skip


def test_claims_on_growth_and_contexts_are_judged_on_the_page(measured, tmp_path):
    """Per question, MemOPD leads by 0.0625 at Q2 and by 0.375 and 0.375 at Q8; its peaks are 100 tokens lower."""
    claimed = replace(SHOWN, grows=SHOWN.claims, shorter=SHOWN.claims)
    show("main", claimed, measured, {}, tmp_path)
    made, text = page(tmp_path)
    of_all = {o["kind"]: o for o in made["orders"] if not o["data"] and o["kind"] != "f1"}
    assert of_all["growth"]["holds"]
    assert of_all["peak"]["holds"]
    failing, _, holding = text.partition("## Orders that hold")
    assert "| MemOPD's advantage over PPO per question grows: +0.062, +0.375 | all | Q2, Q8 | +0.312 |" in holding
    assert "| MemOPD below PPO in peak ×10² | all | Q8 | -1.00 | -1.00 to -1.00 | 2 of 2 |" in holding
    assert "below PPO in peak" not in failing
    show("main", replace(claimed, grows=(), shorter=(("ppo", "memopd"),), compare=(("ppo", "memopd"),)), measured, {},
         tmp_path)  # fmt: skip
    assert (
        "| PPO below MemOPD in peak ×10² | all | Q8 | +1.00 |" in page(tmp_path)[1].partition("## Orders that hold")[0]
    )
    rewritten("main", claimed, tmp_path)
    assert "| PPO below MemOPD in peak ×10² |" in page(tmp_path)[1]  # a page is a function of its JSON


def test_extras_are_not_run_unless_they_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    asked = []
    monkeypatch.setattr("paper.suite.make", lambda parts, *_: asked.append(parts) or Made())

    def jobs(*words):
        CliRunner().invoke(app, [*words, "--of", "real", "--work", str(tmp_path), "--only", "any"])
        return [job.name for job in asked.pop().jobs()]

    extras = ("grpo", "long", "full_response", "amem", "-3", "-4")
    assert not [name for name in jobs("main", "control", "single") if any(extra in name for extra in extras)]
    groups = jobs("control", "--config", "paper/real/groups.toml")
    assert [f"train:{arm}-{seed}" for seed in (0, 1, 2) for arm in ("grpo", "memopd-grpo")] == [
        name for name in groups if name.startswith("train:") and "grpo" in name
    ]
    five = jobs("main", "control", "--seeds", "0,1,2,3,4")
    assert {"train:memopd-3", "train:ppo-4", "evaluate:student-4", "evaluate:memopd-0:mem1"} <= set(five)
    assert "evaluate:memopd-3:mem1" not in five
    CliRunner().invoke(
        app, ["main", "--of", "real", "--config", "paper/real/memories.toml", "--work", str(tmp_path), "--only", "any"]
    )
    work = asked.pop()
    assert not work.arms
    files = {Path(part.output).relative_to(tmp_path / "evaluations") for _, plan in work.plans() for part in plan.parts}
    assert {file.parent.name for file in files} == {"test"}  # no rule makes folders of its own
    notes = "student-amem-runs-real-models-all-MiniLM-L6-v2-0-nq-q16.json"
    assert notes in {file.name for file in files}
    rules = {part.memory for _, plan in work.plans() for part in plan.parts}
    assert rules == {"mem1", "full_response", "truncate", "amem:runs/real/models/all-MiniLM-L6-v2"}
    assert label("student-amem:runs/real/models/all-MiniLM-L6-v2") == "SFT, amem"
    configs = [asked_of.config_of(arm, 3) for asked_of in [Work(load(Suite, REAL / "suite.toml"), tmp_path, ())]
               for arm in ("ppo", "grpo", "memopd", "memopd-grpo")]  # fmt: skip
    assert [c.optimise.algorithm for c in configs] == ["ppo", "grpo", "ppo", "grpo"]
    assert [c.teacher.state for c in configs] == ["none", "none", "aligned", "aligned"]


MAIN = """
title = "Small"
suite = "{folder}/suite-lora.toml"
horizons = [1, 2]
systems = ["teacher-mem1", "student-mem1", "ppo", "memopd", "teacher-only"]
compare = [["memopd", "ppo"]]
claims = [["memopd", "ppo"]]
"""


@pytest.mark.slow
def test_some_jobs_on_one_machine_the_rest_on_another(tmp_path):
    (tmp_path / "main.toml").write_text(MAIN.format(folder=shop()))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def python(*words):
        subprocess.run([sys.executable, "-m", *map(str, words)], cwd=ROOT, env=environment, check=True)

    def main(work, *more):
        python("paper", "main", "--config", tmp_path / "main.toml", "--work", tmp_path / work, "-o", tmp_path, *more)

    main("there", "--only", "train:ppo-0,evaluate:ppo-0", "--minutes", "0.02")  # ended before anything is done
    assert not (tmp_path / "there" / "q2" / "ppo-0" / "adapter").exists()
    main("there", "--only", "train:ppo-0,train:memopd-1,evaluate:ppo-0")
    python("paper.bring", "pack", tmp_path / "there", tmp_path / "out")
    python("paper.bring", "unpack", tmp_path / "out", tmp_path / "here")
    kept = [*(tmp_path / "here").rglob("*-q1.json"), *(tmp_path / "here").rglob("*.safetensors")]
    before = {file: file.stat().st_mtime_ns for file in kept}
    assert len(before) == 4  # two data sets, two adapters
    main("here")
    made, _ = page(tmp_path)
    assert made["missing"] == []
    assert {r["system"] for r in made["data"]["b"]["results"]} == {r["system"] for r in made["results"]}
    assert {file: file.stat().st_mtime_ns for file in kept} == before  # nothing was made again


# ---- preparation

STUB = """#!/bin/sh
echo "memopd $*" >> "{log}"
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then touch "$2"; fi; shift; done
"""


def test_preparation_makes_what_the_settings_read_and_nothing_twice(tmp_path):
    """With a command in place of memopd that makes empty files. Every file that the settings name must be there."""
    script, log = tmp_path / "paper" / "real" / "prepare.sh", tmp_path / "log"
    script.parent.mkdir(parents=True)
    shutil.copy(REAL / "prepare.sh", script)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    stub = tmp_path / ".venv" / "bin" / "memopd"
    stub.write_text(STUB.format(log=log))
    stub.chmod(0o755)
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    of_both = [f"more/{name}" for name in ("corpus", "hotpotqa-train", "hotpotqa-dev", "squad-train", "squad-dev")]
    for name in ("nq", "hotpotqa", "corpus", *of_both):
        (data / f"{name}.jsonl.gz").write_bytes(name.encode())
    command = ["sh", str(script), str(data), "a-tokenizer"]
    subprocess.run(command, check=True)
    ran = log.read_text().splitlines()
    suite, training = load(Suite, REAL / "suite.toml"), load_config(REAL / "training.toml")
    tasks = [suite.evaluation.tasks.format(split=split, data=data, k=k)
             for split in ("dev", "test") for data in suite.evaluation.data for k in (1, 2, 8, 16)]  # fmt: skip
    shown = [load_config(REAL / f"sft-{who}.toml").sft.episodes for who in ("student", "teacher")]
    needed = [*tasks, training.tasks.train, training.tasks.dev, training.tasks.index, *(e for of in shown for e in of)]
    assert [name for name in needed if not (tmp_path / name).exists()] == []
    assert len(ran) == len(set(needed))  # student and teacher share demonstrations
    assert (tmp_path / "runs/real/questions/squad.jsonl.gz").read_text() == "more/squad-trainmore/squad-dev"
    (tmp_path / tasks[0]).unlink()
    subprocess.run(command, check=True)
    assert log.read_text().splitlines()[len(ran) :] == [line for line in ran if tasks[0] in line]
