"""Run directories to what a page shows of them, without a browser."""

import json
import math

import numpy as np
import pytest
from pages import HOSTILE, add_evaluation, hostile_tokenizer, run_of, run_with_notes
from train.tiny import THINK
from typer.testing import CliRunner

from memopd.cli.report import app
from memopd.evaluate import Measures
from memopd.record import read_episodes, write_episodes
from memopd.report.curves import POINTS, ends, groups, series, stages
from memopd.report.episodes import ID_BYTES, episodes_of, texts, vocabulary
from memopd.report.evaluations import tables
from memopd.report.page import embedded, page, page_data, part
from memopd.report.runs import arms_of, read_runs
from memopd.types import Call, Episode


def folder(path, lines=(), **config):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"run": {"seed": 0}} | config))
    if lines:
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_that_differ_in_the_seed_alone_are_one_arm(tmp_path):
    paths = [
        folder(tmp_path / f"{arm}/seed-{seed}", run={"seed": seed}, teacher={"state": state})
        for arm, state in (("memopd", "aligned"), ("ppo", "none"))
        for seed in range(3)
    ]
    runs = read_runs(paths)
    assert [run.name for run in runs][:2] == ["memopd/seed-0", "memopd/seed-1"]
    assert [(arm.label, arm.runs) for arm in arms_of(runs)] == [("memopd", (0, 1, 2)), ("ppo", (3, 4, 5))]
    assert read_runs(paths[:1])[0].name == "seed-0"


def test_where_float32_decided_its_word_counts(tmp_path):
    checks = folder(tmp_path / "run") / "equivalence"
    checks.mkdir()
    for name, passed in (("step-000000", False), ("step-000000-float32", True), ("step-000050", True)):
        (checks / f"{name}.json").write_text(json.dumps({"passed": passed}))
    [run] = read_runs([tmp_path / "run"])
    assert run.equivalence == {0: {"passed": True}, 50: {"passed": True}}


def test_a_call_that_is_not_an_action_has_its_purpose(tmp_path):
    """The label of a note, which a memory rule names as it likes: it is data, and cannot end the block of JSON."""
    purpose = "".join(HOSTILE)
    data = page_data(read_runs([run_with_notes(tmp_path, purpose)]))
    [episode] = data["runs"][0]["episodes"]
    assert [call["purpose"] for call in episode["calls"]] == ["", purpose, *[""] * (len(episode["calls"]) - 2)]
    assert purpose not in page(data)
    assert json.loads(embedded(data))["runs"][0]["episodes"][0]["calls"][1]["purpose"] == purpose


def test_refusals(tmp_path):
    run = folder(tmp_path / "run")
    with pytest.raises(ValueError, match="not a run directory"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="given twice"):
        read_runs([run, tmp_path / "." / "run"])
    (run / "evaluation").mkdir()
    (run / "evaluation" / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="not written by"):
        read_runs([run])
    (run / "evaluation").rename(run / "audit")
    with pytest.raises(ValueError, match=r"audit/x\.json: not written by `memopd audit -o`"):
        read_runs([run])
    (run / "audit").rename(run / "evaluation")
    (run / "evaluation" / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json: not JSON"):
        read_runs([run])
    said = CliRunner().invoke(app, [str(run), str(tmp_path / "other")])
    assert "name it with -o page.html" in str(said.exception)


def test_the_command_writes_into_the_run(tmp_path):
    run = folder(tmp_path / "run", [{"step": 0, "loss": 2.0, "seconds_update": 1.0}])
    said = CliRunner().invoke(app, [str(run), "--json"])
    assert json.loads(said.output) == {
        "page": str(run / "report.html"), "bytes": (run / "report.html").stat().st_size, "runs": 1, "episodes": 0,
    }  # fmt: skip
    assert [f.name for f in run.iterdir() if "html" in f.name] == ["report.html"]


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    data = page_data(read_runs([folder(tmp_path / "run")]))
    assert data["charts"] == []
    assert data["runs"][0]["episodes"] == []
    assert "At a glance" in page(data)


def test_curves_keep_their_mean(tmp_path):
    lines = [{"step": s, "reward": float(s), "dev_em": 1.0 if s % 10 == 9 else None} for s in range(3 * POINTS)]
    made = series(lines)
    assert made["width"] == 3
    assert made["steps"][:2] == [3, 6]
    assert made["values"]["reward"][:2] == [1.0, 4.0]
    assert made["values"]["dev_em"][:4] == [None, None, None, 1.0]
    assert series(lines[:5])["values"]["reward"] == [0, 1, 2, 3, 4]
    shown = groups([[{"step": 0, "reward": 1, "mine": 2, "seconds_update": 1}]])
    assert [(g["title"], [c["key"] for c in g["charts"]]) for g in shown] == [
        ("Does it learn?", ["reward"]),
        ("Other", ["mine"]),
    ]


def test_how_a_run_began_and_ended():
    lines = [{"step": s, "reward": float(s), "dev_em": float(s)} for s in range(40)]
    reward, dev = ends(lines)
    assert [e["steps"] for e in reward["ends"]] == [[1, 5], [36, 40]]
    assert [e["mean"] for e in reward["ends"]] == [2, 37]
    assert reward["ends"][0]["spread"] == pytest.approx(math.sqrt(2.5 / 5))
    assert [e["mean"] for e in dev["ends"]] == [0, 39]
    assert [e["steps"] for e in ends(lines[:7])[0]["ends"]] == [[1, 3], [5, 7]]
    assert [e["steps"] for e in ends(lines * 3)[0]["ends"]] == [[1, 12], [29, 40]]
    assert stages([{"seconds_update": 1.0}, {"seconds_update": 2.0, "seconds_dev": None}]) == {"update": 3.0}


def test_a_drift_that_nobody_measured_is_no_curve():
    lines = [{"step": s, "reward": 1.0, "reference_kl": 0.0} for s in range(3)]
    assert list(series(lines)["values"]) == ["reward"]
    lines[2]["reference_kl"] = 0.1
    assert list(series(lines)["values"]) == ["reference_kl", "reward"]


def test_every_curve_of_a_run_is_described():
    keys = {k for run in read_runs([run_of()]) for line in run.metrics for k in line}
    shown = groups([read_runs([run_of()])[0].metrics])
    assert all(g["title"] != "Other" for g in shown), keys


def test_evaluations_have_intervals_and_differences(tmp_path):
    run = folder(tmp_path / "run")
    for name, rate in (("after", 0.7), ("before", 0.2), ("same", 0.7)):
        add_evaluation(run, name, rate)
    (table,) = tables(read_runs([run]))
    assert [line["name"] for line in table["lines"]] == ["before", "after", "same"]
    before, after, same = table["lines"]
    assert "against_first" not in before
    mean, low, high = after["metrics"]["em"]
    p = np.mean(np.random.default_rng(7).random(40) < 0.7)
    assert mean == pytest.approx(p)
    half = 1.96 * math.sqrt(p * (1 - p) / 40)
    assert (low, high) == pytest.approx((p - half, p + half), abs=0.03)
    assert after["against_first"]["em"]["low"] > 0
    assert after["against_first"]["em"]["p"] < 0.01
    assert same["against_first"] == after["against_first"]
    assert after["metrics"]["seconds"] is None  # sixteen episodes shared the engine
    file = run / "evaluation" / "after.json"
    file.write_text(file.read_text().replace('"batch_size": 16', '"batch_size": 1'))
    assert tables(read_runs([run]))[0]["lines"][1]["metrics"]["seconds"] is not None


def test_evaluations_on_other_tasks_are_not_compared(tmp_path):
    run = folder(tmp_path / "run")
    add_evaluation(run, "before", 0.2)
    add_evaluation(run, "after", 0.2)
    file = run / "evaluation" / "after.json"
    there = json.loads(file.read_text())
    there["tasks"][0][0] = [m | {"task": "x" + m["task"]} for m in there["tasks"][0][0]]
    assert Measures(**there["tasks"][0][0][0]).task == "xt0"
    file.write_text(json.dumps(there))
    (table,) = tables(read_runs([run]))
    assert table["lines"][1]["against_first"] is None


def test_episodes_fit_their_budget():
    (run,) = read_runs([run_of()])
    everything, ids = episodes_of(run, 10**9)
    assert [e["step"] for e in everything] == [1] * 4 + [2] * 4 + [3] * 4
    assert all(set(e["calls"][0]) >= {"advantage", "value", "divergence", "taught"} for e in everything)
    size = len(json.dumps(everything, separators=(",", ":"))) + ID_BYTES * len(ids)
    some, fewer = episodes_of(run, size // 2)
    assert len(json.dumps(some, separators=(",", ":"))) + ID_BYTES * len(fewer) <= size // 2
    assert {e["step"] for e in some} == {1, 2, 3}
    assert fewer.tolist() == ids[: len(fewer)].tolist()  # nothing of the episode that did not fit
    (only,), _ = episodes_of(run, 1)
    assert only["step"] == 3


def test_the_page_has_the_ids_that_were_recorded():
    """Prompts and completions, from the pool of the run and the spans of its episodes."""
    (run,) = page_data(read_runs([run_of()]))["runs"]
    pool = [run["vocabulary"]["ids"][n] for n in run["pool"]]
    recorded = {e.id: e for file in sorted((run_of() / "episodes").iterdir()) for e in read_episodes(file)}
    for episode in run["episodes"]:
        flat = spans(pool, episode["flat"])
        for call, real in zip(episode["calls"], recorded[episode["id"]].calls, strict=True):
            pieces = [spans(pool, more[0]) if more else flat[at : at + n] for _, _, n, at, _, *more in call["read"]]
            assert [i for piece in pieces for i in piece] == real.prompt.tolist()
            assert flat[call["begin"] : call["begin"] + call["sampled"]] == real.completion.tolist()


def spans(pool, list):
    return [i for at, n in zip(list[::2], list[1::2], strict=True) for i in pool[at : at + n]]


def test_what_episodes_share_is_on_the_page_once(tmp_path):
    """64 episodes of 16 calls with the same instructions of 2,000 ids: the page has these ids once, not 1,024 times."""
    rng = np.random.default_rng(0)
    instructions = rng.integers(0, 150_000, 2000)
    episodes = []
    for n in range(64):
        prompt, calls = instructions, []
        for _ in range(16):
            calls.append(Call(prompt, rng.integers(0, 150_000, 20)))
            prompt = np.concatenate([prompt, calls[-1].completion, rng.integers(0, 150_000, 30)])
        episodes.append(Episode(f"e{n}", "t", calls))
    run = folder(tmp_path / "run")
    write_episodes(run / "episodes" / "step-000000.parquet", episodes)
    whole = page_data(read_runs([run]))
    (data,) = whole["runs"]
    assert len(data["episodes"]) == 64
    assert len(data["pool"]) == 2000 + 64 * (16 * 20 + 15 * 30)
    assert [call["before"] for call in data["episodes"][5]["calls"]][1:3] == [((0, 2020),), ((0, 2070),)]
    assert len(page(whole)) < 1.5e6


def test_episodes_without_traces_are_shown_without_numbers(tmp_path):
    """Of runs that kept none, and of steps whose traces are gone."""
    run = folder(tmp_path / "run")
    (run / "episodes").symlink_to(run_of() / "episodes")
    (data,) = page_data(read_runs([run]))["runs"]
    assert len(data["episodes"]) == 12
    assert "advantage" not in data["episodes"][0]["calls"][0]
    assert data["episodes"][0]["calls"][0]["logp"]  # the sampler's own
    assert data["vocabulary"]["texts"] is None


def test_special_tokens_are_known(tmp_path):
    tokenizer = hostile_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    tokenizer.save_pretrained(tmp_path / "run" / "model")
    (tmp_path / "run" / "config.json").write_text("{}")
    (run,) = read_runs([tmp_path / "run"])
    found = vocabulary(run, np.array([5, 5, THINK, 6], np.int32))
    assert found == {"ids": [5, *sorted([6, THINK])], "texts": found["texts"], "special": [1 + (THINK > 6)]}


def test_an_id_reads_as_it_does_in_the_middle_of_a_text():
    tokenizer = hostile_tokenizer()
    found = texts(tokenizer, [3, 4])
    assert found == {3: " w3", 4: " w4"}  # its decoder puts a space between words, and none before the first


def test_no_text_can_end_the_block_it_stands_in():
    text = embedded({"</script>": ["<!--<script>", float("nan"), 1.23456789]})
    assert "<" not in text
    assert json.loads(text) == {"</script>": ["<!--<script>", None, 1.2346]}
    assert "$data" in part("page.html")
