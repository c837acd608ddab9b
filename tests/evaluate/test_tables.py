"""Runs to lines, lines to tables."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from memopd.evaluate import (
    Comparison,
    Estimate,
    Measures,
    Setting,
    compare,
    comparison_table,
    costs_table,
    summarise,
    table_1,
    table_2,
)
from memopd.evaluate.summary import METRICS, by_task

SETTING = Setting("squad", "scripted", 1)


def measures(task: str, em: float, k: int = 2, seconds: float | None = 2.0, peak: int = 700) -> Measures:
    return Measures(task, k, em, em, True, 3, peak, None, 150_000, seconds)


def text(table) -> str:
    console = Console(width=400, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_one_run_has_standard_errors_over_tasks():
    result = summarise("oracle", [[measures("t0", 2), measures("t1", 0, peak=900)]], SETTING)
    assert (result.k, result.tasks, result.seeds) == (2, 2, 1)
    assert result.metrics["em"] == Estimate(1, pytest.approx(1), 2)  # s = √2, over √2
    assert result.metrics["peak"] == Estimate(800, pytest.approx(100), 2)
    assert result.metrics["peak_without_q"] is None
    assert result.as_dict()["spread"] == "standard error over tasks"


def test_episodes_of_one_task_are_not_independent_tasks():
    run = [measures("t0", 2), measures("t0", 1), measures("t0", 0), measures("t1", 0)]
    assert by_task(run, "em") == {"t0": 1, "t1": 0}
    assert summarise("s", [run], SETTING).metrics["em"] == Estimate(0.5, pytest.approx(0.5), 2)


def test_several_seeds_have_standard_deviations_of_their_means():
    runs = [[measures("t0", em), measures("t1", em + 1)] for em in (0, 0.5, 1)]  # means .5, 1, 1.5
    result = summarise("s", runs, SETTING)
    assert result.metrics["em"] == Estimate(1, pytest.approx(0.5), 3)
    assert (result.tasks, result.seeds) == (2, 3)
    assert result.as_dict()["spread"] == "standard deviation over seeds"


def test_what_was_not_recorded_for_all_is_not_averaged():
    run = [measures("t0", 1), measures("t1", 1, seconds=None)]
    assert summarise("s", [run], SETTING).metrics["seconds"] is None
    with pytest.raises(ValueError, match="seconds was not recorded for every episode"):
        compare(run, run, "seconds")


def test_a_line_is_of_one_k_and_of_the_same_tasks():
    with pytest.raises(ValueError, match=r"s: a line needs tasks of one k, got k = \[2, 8\]"):
        summarise("s", [[measures("t0", 1), measures("t1", 1, k=8)]], SETTING)
    with pytest.raises(ValueError, match="seeds were run on different tasks: 't1' is not in all"):
        summarise("s", [[measures("t0", 1), measures("t1", 1)], [measures("t0", 1)]], SETTING)


def test_systems_are_compared_on_the_same_tasks():
    a, b = [measures("t0", 2), measures("t1", 1)], [measures("t0", 1), measures("t1", 0)]
    assert compare(a, b) == Comparison(1, 1, 1, pytest.approx(2 / 10_001), 2)
    with pytest.raises(ValueError, match="different tasks"):
        compare(a, b[:1])
    assert "a minus b, paired bootstrap over 2 tasks" in text(comparison_table("a", "b", {"em": compare(a, b)}))


def test_table_1_has_the_papers_columns_and_says_how_they_were_made():
    two = [[measures("t0", 2), measures("t1", 0, peak=900)]]
    eight = [[measures("u0", 4, k=8), measures("u1", 4, k=8)]]
    results = [
        summarise("[sft] 3B", two, SETTING),
        summarise("[sft] 3B", eight, SETTING),
        summarise("other", two * 5, replace(SETTING, engine="vLLM", batch_size=64)),
    ]
    shown = text(table_1(results))
    heading = "Q2 EM ↑ Q2 F1 ↑ Q2 peak ↓ ×10² Q2 time ↓ s Q8 EM ↑ Q8 F1 ↑ Q8 peak ↓ ×10² Q8 time ↓ s"
    lines = [" ".join(line.replace("│", " ").replace("┃", " ").split()) for line in shown.splitlines()]
    assert f"system {heading}" in lines
    two_cells = "1.000 ± 1.000 1.000 ± 1.000 8.00 ± 1.00 2.00 ± 0.00"
    assert f"[sft] 3B {two_cells} 4.000 ± 0.000 4.000 ± 0.000 7.00 ± 0.00 2.00 ± 0.00" in lines
    assert "other 1.000 ± 0.000 1.000 ± 0.000 8.00 ± 0.00 - - - - -" in lines  # its trajectories shared the engine
    assert "grading squad" in shown
    assert "[sft] 3B: 2 tasks of Q2, 2 tasks of Q8; ± standard error; time on scripted, one trajectory" in shown
    assert "other: 2 tasks of Q2; ± standard deviation over 5 seeds; no time, because 64 trajectories" in shown


def test_table_2_has_dependency():
    result = summarise("s", [[measures("t0", 1, k=1), measures("t1", 0, k=1)]], SETTING)
    shown = text(table_2([result]))
    assert "Q1 dependency ↓ ×10⁵" in shown
    assert "1.500 ± 0.000" in shown


@pytest.mark.parametrize("setting", [Setting("squad", "local", 2), Setting("squad", "local", 1, processes=2)])
def test_time_is_shown_only_where_trajectories_do_not_wait_for_each_other(setting):
    result = summarise("s", [[measures("t0", 1), measures("t1", 0)]], setting)
    shown = text(table_1([result]))
    assert "time ↓" not in shown
    assert "no time, because 2 trajectories shared the engine (local): --batch 1 measures it" in " ".join(shown.split())
    assert result.as_dict()["metrics"]["seconds"]["mean"] == 2  # with the setting beside it
    assert "Q2 time ↓ s" in text(table_1([replace(result, setting=SETTING)]))


def test_costs_with_and_without_q_by_hand():
    """Three tasks: EM 2, 0 and 1 (no list of the right length in the second); q has 200 tokens."""
    rows = [("t0", 2, 600, 9e4), ("t1", 0, 1000, 6e4), ("t2", 1, 800, 3e4)]
    run = [
        Measures(task, 2, em, em, em > 0, 3, peak, peak - 200, int(cost), 1.0, int(cost / 3))
        for task, em, peak, cost in rows
    ]
    found = summarise("s", [run], SETTING).metrics
    assert {name: found[name].mean for name in ("valid", "peak", "peak_without_q", "peak_without_q_em0_dropped")} == {
        "valid": pytest.approx(2 / 3),
        "peak": 800,  # (600 + 1000 + 800) / 3
        "peak_without_q": 600,  # (400 + 800 + 600) / 3
        "peak_without_q_em0_dropped": 500,  # (400 + 600) / 2
    }
    assert found["peak_without_q_em0_dropped"].n == 2
    assert (found["dependency"].mean, found["dependency_without_q"].mean) == (60_000, 20_000)
    lines = [
        " ".join(line.replace("│", " ").split())
        for line in text(costs_table([summarise("s", [run[:1]], SETTING)])).splitlines()
    ]
    assert [line for line in lines if "↓" in line or "↑" in line] == [
        "valid answers ↑ % 100.0",
        "peak ↓ ×10² 6.00",
        "peak without q ↓ ×10² 4.00",
        "peak without q, EM = 0 dropped ↓ ×10² 4.00",
        "dependency ↓ ×10⁵ 0.900",
        "dependency without q ↓ ×10⁵ 0.300",
    ]
    assert any("s, Q2" in line for line in lines)
    narrow = Console(width=80, no_color=True)
    with narrow.capture() as capture:
        narrow.print(costs_table([summarise("s", [run], SETTING)] * 2))
    for heading in ("valid answers ↑ %", "peak without q, EM = 0 dropped", "dependency without q"):
        assert heading in capture.get()


def test_episodes_are_dropped_before_they_are_averaged_by_task():
    run = [replace(measures("t0", em), peak_without_q=peak) for em, peak in ((0, 900), (1, 500), (2, 300))]
    assert by_task(run, "peak_without_q_em0_dropped") == {"t0": 400}
    assert by_task(run[:1], "peak_without_q_em0_dropped") is None  # nothing is left
    assert summarise("s", [run[:1]], SETTING).metrics["peak_without_q_em0_dropped"] is None
    assert by_task([measures("t0", 1)], "peak_without_q_em0_dropped") is None  # which part is q was not recorded


def test_tables_do_not_mix_gradings_or_lines():
    runs = [[measures("t0", 1), measures("t1", 1)]]
    result = summarise("s", runs, SETTING)
    with pytest.raises(ValueError, match=r"results of one grading, got \['mem1', 'squad'\]"):
        table_1([result, summarise("r", runs, replace(SETTING, grading="mem1"))])
    with pytest.raises(ValueError, match="two results for one k"):
        table_1([result, result])


def test_results_are_json():
    result = summarise("s", [[measures("t0", 1)]], SETTING)
    read = json.loads(json.dumps(result.as_dict()))
    assert read["metrics"]["em"] == {"mean": 1.0, "spread": None, "n": 1}
    assert read["metrics"]["peak_without_q"] is None
    assert read["setting"] == {"grading": "squad", "engine": "scripted", "batch_size": 1, "processes": 1}
    assert set(read["metrics"]) == set(METRICS)
