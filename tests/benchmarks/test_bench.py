"""The benchmarks run, on small sizes, and what they print reads back."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from calls import mem1_calls
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.attention import thin_trie, trie_of
from benchmarks.shapes import episodes_of, independent, merged_rows
from benchmarks.table import markdown
from benchmarks.tables import load, plot, tables_of
from memopd.compile import compile_calls
from memopd.record import write_episodes
from memopd.types import Call, Episode
from memopd.verify import structural_problems


def bench(*arguments):
    return subprocess.run([sys.executable, "-m", "benchmarks", *arguments], capture_output=True, text=True, timeout=300)


def bench_here(*arguments):
    """Without the seconds that a process takes to import torch."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.alone
def test_the_compiler_is_fast_linear_and_small():
    """4,096 calls of about 1,000 tokens, and ten times as many."""
    for _ in range(3):  # a machine busy with other work gets another chance: it slows either half at random
        done = bench("compile", "--json")  # a process of its own: no other objects for the garbage collector to visit
        one, ten = (json.loads(line) for line in done.stdout.splitlines())
        if ten["seconds"] <= 11 * one["seconds"]:
            break
    assert ten["tokens"] > 9 * one["tokens"]
    assert ten["seconds"] <= 11 * one["seconds"]
    assert 900 <= one["tokens"] / one["calls"] <= 1100
    assert one["tokens_per_second"] >= 20e6
    assert max(one["memory"], ten["memory"]) <= 4


@pytest.mark.parametrize("shape", ["q2", "q8", "q16", "append"])
def test_every_layout_holds_the_same_calls(shape):
    episodes = episodes_of(shape)
    calls = [c for e in episodes for c in e.calls]
    for layout in (independent(episodes), merged_rows(episodes), compile_calls(calls)):
        assert structural_problems([layout], calls) == []


def test_the_audit_shape_is_the_papers():
    episodes = episodes_of("audit")
    calls = [c for e in episodes for c in e.calls]
    assert (len(episodes), len(calls), sum(len(c.completion) for c in calls)) == (64, 199, 12_083)
    observations = sum(
        len(b.prompt) - len(a.prompt) for e in episodes for a, b in zip(e.calls, e.calls[1:], strict=False)
    )
    assert observations > 0


def test_append_only_calls_merge_and_others_do_not():
    assert len(merged_rows(episodes_of("append"))) == len(compile_calls(episodes_of("append")[0].calls))
    assert len(merged_rows(episodes_of("q2"))) == len(independent(episodes_of("q2")))


def test_tries_have_the_depth_and_leaves_asked_for():
    assert len(np.unique(trie_of(1000, 4, 27).decisions.call)) == 27
    packed = thin_trie(1000, 10)
    assert len(packed) == pytest.approx(1000, abs=10)


def test_results_read_back_as_tables_and_plots(tmp_path):
    results = tmp_path / "r.jsonl"
    sizes = ("--rows", "256", "--depths", "2", "--calls", "4", "--dtype", "float32")
    results.write_text(bench_here("attention", *sizes, "--repeats", "1", "--json"))
    loaded = load(results)
    assert {r.kernel for r in loaded} == {"dense", "flex", "cascade, levels", "cascade, paths"}
    assert all(math.isnan(r.seconds) for r in loaded if r.kernel == "flex")  # null: not measured on a CPU
    assert markdown(tables_of(loaded)[0]).count("\n| balanced") == 1
    plot(loaded, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes()[:4] == b"\x89PNG"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_actor_benchmark_on_recorded_episodes(tmp_path):
    helper = Call([1, 2], [3], trainable=False)
    write_episodes(tmp_path / "e.parquet", [Episode("e", "t", [helper, *mem1_calls(0)])])
    what = ("--model", "tiny", "--episodes", str(tmp_path / "e.parquet"), "--dtype", "float32")
    result = json.loads(bench_here("actor", *what, "--repeats", "1", "--json"))
    arms = {a["name"]: a for a in result["arms"]}
    assert arms["packed, cascade"]["rows"] < arms["independent, varlen flash"]["rows"]
    assert "CPU" in arms["packed, flex"]["note"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["actor", "--model", "tiny", "--shapes", "q3"], "unknown shape 'q3'"),
        (["actor", "--model", "tiny", "--batches", "x"], "expected whole numbers"),
        (["head", "--widths", "64"], "student:teacher"),
        (["rce", "--model", "tiny", "--dtypes", "bf16"], "bf16"),
        (["show", "pyproject.toml"], "line 1: not a line of JSON"),
    ],
)
def test_mistakes_get_one_line(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
