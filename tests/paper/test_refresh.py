"""Documents show real questions first where they were run. All numbers here are made up, for the tests alone."""

import json
import shutil
from pathlib import Path

import pytest
from small import write_result

from paper import refresh
from paper.evaluation import Part, measured_with
from paper.settings import Shown, Suite, load
from paper.suite import Work
from paper.trained import show

ROOT = Path(__file__).parents[2]
REAL = ROOT / "paper" / "real"
BLOCKS = ("summary", "orders", "state", "quality", "claims")
F1 = {  # per question; what MemOPD gains shrinks with the horizon
    "teacher-mem1": (0.9, 0.8, 0.7), "student-mem1": (0.2, 0.2, 0.2), "ppo": (0.5, 0.4, 0.45),
    "memopd-0.02": (0.5, 0.4, 0.4), "memopd": (0.6, 0.5, 0.375), "persistent": (0.3, 0.3, 0.3),
    "teacher-only": (0.1, 0.1, 0.1),
}  # fmt: skip
PEAK = {"memopd": 300}


def write_results(work: Path, output: Path, split: str = "test") -> None:
    """Made-up evaluations of the suite as it ships, and the pages that they make."""
    suite = load(Suite, REAL / "suite.toml")
    experiments = {name: load(Shown, REAL / f"{name}.toml") for name in ("main", "control")}
    made = Work(suite, work, (), split)
    for system, scores in F1.items():
        for k, score in zip((2, 8, 16), scores, strict=True):
            for seed in suite.seeds_of(system):
                for i, data in enumerate(suite.evaluation.data):
                    f1 = [(0.0, k * score + 0.02 * (seed + j + i)) for j in range(2)]
                    for of in (made, made.under("mem1"))[: 2 if seed == 0 else 1]:
                        file = of.result_of(system, seed, k, data)
                        part = Part(system, seed, k, "mem1", of.tasks_of(data, k), "")
                        write_result(file, system, seed, k, f1, measured_with(part, of.suite.evaluation))
                        found = json.loads(file.read_text())
                        for j, measure in enumerate(found["measures"]):
                            measure |= {"task": f"{data}{j}", "peak": PEAK.get(system, 400)}
                        file.write_text(json.dumps(found))
    for name, shown in experiments.items():
        show(name, shown, made, {}, output)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The results, made once: their pictures take seconds."""
    folder = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        write_results(folder / "work", folder / "results")
    return folder / "results"


@pytest.fixture
def real(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(refresh, "REAL", folder)
    return folder


def blocks():
    return {name: refresh.BLOCKS[name]() for name in BLOCKS}


def test_without_results_on_real_questions_nothing_changes(real, tmp_path):
    before = blocks()
    for name in BLOCKS:
        assert "real questions" not in before[name]
    shutil.copy(REAL / "results" / "lora-dev.json", real)
    assert blocks() == before
    write_results(tmp_path / "work", real, "dev")  # for choosing settings: not shown
    assert {f.name for f in real.glob("*.json")} == {"lora-dev.json", "main.json", "control.json"}
    assert blocks() == before


def test_real_questions_come_first_and_the_world_second(real, written):
    before = blocks()
    shutil.copytree(written, real, dirs_exist_ok=True)
    after = blocks()
    assert after["state"] == before["state"]  # that was not run
    for name in ("orders", "quality", "claims"):
        ours, _, world = after[name].partition("In the embedded world, the second evidence")
        assert world.endswith(before[name])
        assert "real questions" in ours
    assert "| SFT: the student | 0.000 ± 0.000 | 0.450 ± 0.020 |" in after["quality"]
    assert after["quality"].index("| teacher |") < after["quality"].index(
        "| **+ PPO + teacher in exact states (MemOPD)** |"
    )
    assert "nq, hotpotqa, squad; test split, 6 tasks of 2 questions, 6 tasks of 8 questions" in after["quality"]
    assert "+ PPO + teacher in exact states, the paper's λ" in after["quality"]
    state = json.loads((ROOT / "paper" / "world" / "results" / "state.json").read_text())
    state["settings"] |= {"model": "base", "adapter": "made/up"}
    state["representations"][0]["false_clip"] = 0.4321
    (real / "state.json").write_text(json.dumps(state))
    text = refresh.state()
    assert text.startswith("On real questions:")
    assert text.index("43.21 %") < text.index("In the embedded world")
    assert "episodes of `base+made/up`" in text
    assert text.endswith(before["state"])
    assert "PPO would clip 43.2 %" in refresh.summary()


def test_claims_that_do_not_hold_come_first(real, written):
    """MemOPD is above PPO on Q2 and Q8, not on Q16, and its advantage does not grow; its peak is lower."""
    shutil.copytree(written, real, dirs_exist_ok=True)
    for name in ("orders", "claims"):
        text = blocks()[name]
        assert text.startswith("These orders of the plan do **not** hold on real questions:")
        failing, _, rest = text.partition("These orders of the plan hold on real questions:")
        holding = rest.partition("In the embedded world")[0]
        assert "| MemOPD above PPO | all | Q16 | -1.200 |" in failing
        assert "| MemOPD's advantage over PPO per question grows: +0.100, -0.075 | all | Q2, Q16 | -0.175 |" in failing
        assert "| MemOPD above PPO | all | Q2 | +0.200 |" in holding
        assert "| MemOPD above persistent OPD | all | Q2 |" in holding
        assert "| MemOPD below PPO in peak ×10² | all | Q16 | -1.00 |" in holding
        assert ("| nq |" in text) == (name == "claims")  # README has all data sets together


def test_the_summary_marks_the_highest_whoever_it_is(real, written):
    shutil.copytree(written, real, dirs_exist_ok=True)
    text = refresh.summary()
    assert "+ teacher in flattened states 0.65; **+ teacher in exact states 1.25** |" in text
    assert "F1 on 16 questions | student 3.25; **+ PPO 7.25**; + teacher in flattened states 4.85;" in text
    assert "The same in the embedded world: F1 on two questions; grpo" in text
    assert text.count("**") == 2 * 4  # three horizons, and speed


def test_what_is_missing_is_said(real, written):
    shutil.copytree(written, real, dirs_exist_ok=True)
    assert "that are missing" not in refresh.orders()
    found = json.loads((real / "main.json").read_text())
    (real / "main.json").write_text(json.dumps(found | {"missing": ["PPO, seed 2, nq, Q16"]}))
    for made in (refresh.orders(), refresh.claims(), refresh.quality()):
        assert "Results that are missing: 1, the first of them PPO, seed 2, nq, Q16." in made
