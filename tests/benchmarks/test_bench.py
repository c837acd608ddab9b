"""The benchmarks run, on small sizes, and what they print reads back."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from calls import mem1_calls
from typer.testing import CliRunner

from benchmarks import shapes
from benchmarks.__main__ import app
from benchmarks.attention import thin_trie, trie_of
from benchmarks.output import markdown
from benchmarks.shapes import episodes_of, independent, merged_rows
from benchmarks.tables import load, plot, tables_of
from memopd.compile import compile_calls
from memopd.models import compiled
from memopd.record import write_episodes
from memopd.types import Call, Episode
from memopd.verify import structural_problems

ROOT = Path(__file__).parents[2]


def bench(*arguments):
    line = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


def bench_here(*arguments):
    """In this process, which has torch already."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture
def small(monkeypatch):
    """A model and calls of sizes that a test can wait for."""
    monkeypatch.setattr(shapes, "VOCABULARY", 200)
    monkeypatch.setitem(shapes.MODELS, "tiny", shapes.MODELS["tiny"] | {"vocab_size": 200})
    monkeypatch.setitem(shapes.SHAPES, "q2", shapes.Shape(calls=3, trajectories=2, q=20, x=12, a=6))


def test_the_compilers_benchmark():
    """16 calls of about 1,000 tokens, and ten times as many."""
    sizes = ("compile", "--episodes", "4", "--calls", "4")
    one, ten = map(json.loads, bench_here(*sizes, "--json").splitlines())
    assert (one["calls"], ten["calls"]) == (16, 160)
    assert one["rows"] < one["tokens"]
    assert "160 calls" in bench_here(*sizes)


@pytest.mark.parametrize("shape", ["q2", "q8", "q16", "append", "samples", "tree"])
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


def test_merged_rows_of_a_fork_repeat_what_the_branches_share():
    [tree] = episodes_of("tree")
    ends = [c for c in tree.calls if not any(len(d.prompt) > len(c.path) and d.prompt[0] == c.prompt[0]
            and np.array_equal(d.prompt[: len(c.prompt) + len(c.completion)], [*c.prompt, *c.completion])
            for d in tree.calls)]  # fmt: skip
    assert len(ends) == 4  # two forks in two
    assert len(merged_rows([tree])) == sum(len(c.path) for c in ends)  # every leaf carries its whole history
    assert len(compile_calls(tree.calls)) < len(merged_rows([tree])) < len(independent([tree]))


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


def test_an_actor_benchmark_on_recorded_episodes(small, tmp_path):
    helper = Call([1, 2], [3], trainable=False)
    write_episodes(tmp_path / "e.parquet", [Episode("e", "t", [helper, *mem1_calls(0)])])
    what = ("--model", "tiny", "--episodes", str(tmp_path / "e.parquet"), "--dtype", "float32")
    result = json.loads(bench_here("actor", *what, "--repeats", "1", "--json"))
    arms = {a["name"]: a for a in result["arms"]}
    assert arms["packed, cascade"]["rows"] < arms["independent, varlen flash"]["rows"]
    assert "CPU" in arms["packed, flex"]["note"]


def test_the_vocabulary_pass_in_small():
    sizes = ("--decisions", "40", "--vocabulary", "100", "--widths", "8:16", "--dtype", "float32", "--repeats", "1")
    result = json.loads(bench_here("head", *sizes, "--json"))
    assert (result["decisions"], result["vocabulary"], result["width"], result["teacher_width"]) == (40, 100, 8, 16)
    assert {"memopd", "naive PyTorch"} <= {arm["name"] for arm in result["arms"]}
    assert "naive PyTorch" in bench_here("head", *sizes)


def test_equivalence_in_small(small):
    what = ("--model", "tiny", "--shapes", "q2", "--dtypes", "float32", "--attentions", "cascade,dense")
    results = [json.loads(line) for line in bench_here("rce", *what, "--json").splitlines()]
    assert [r["logits"]["attention"] for r in results] == ["cascade", "dense"]
    assert all(r["logits"]["passed"] and r["gradients"]["passed"] for r in results)


def test_an_audit_in_small(small, tmp_path):
    results = tmp_path / "r.jsonl"
    results.write_text(bench_here("audit", "--model", "tiny", "--shape", "q2", "--json"))
    (result,) = load(results)
    assert (result.audited, result.calls, result.decisions > 0) == ("tiny", 6, True)
    assert [s.name for s in result.audit_stages][-3:] == ["calls alone, float64", "vocabulary", "whole audit"]
    assert sum(s.seconds for s in result.audit_stages[:-1]) <= result.audit_stages[-1].seconds
    assert "| pair by pair |" in markdown(tables_of([result])[0])


def test_what_the_host_spends_in_small(monkeypatch, tmp_path):
    """Without torch.compile, which takes half a minute; tests/models has what it makes of a layer."""
    monkeypatch.setattr(compiled, "compiled", lambda function: function)
    results = tmp_path / "r.jsonl"
    results.write_text(bench_here("host", "--layers", "2", "--adapters", "0,1", "--repeats", "1", "--json"))
    found = load(results)
    assert [r.adapters for r in found] == [0, 0, 0, 1, 1, 1]
    assert all(r.forward > 0 and r.training > 0 for r in found)
    assert "| compiled, one graph | 2 | 1 |" in markdown(tables_of(found)[0])


def test_a_whole_update_in_small(small):
    what = ("--student", "tiny", "--teacher", "tiny", "--batch", "1", "--dtype", "float32")
    packed, independent = map(json.loads, bench_here("update", *what, "--json").splitlines())
    assert (packed["layout"], independent["layout"]) == ("packed", "independent")
    assert (packed["calls"], packed["episodes"]) == (6, 2)
    assert packed["rows"] < packed["tokens"] == independent["rows"]
    assert [s["name"] for s in packed["stages"]][-2:] == ["update actor", "update critic"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["actor", "--model", "tiny", "--shapes", "q3"], "unknown shape 'q3'"),
        (["actor", "--model", "tiny", "--batches", "x"], "expected whole numbers"),
        (["head", "--widths", "64"], "student:teacher"),
        (["peers", "--shapes", "q3"], "unknown shape 'q3'"),
        (["step", "configs/quickstart.toml", "--arms", "packed"], "unknown arm 'packed'"),
        (["step", "configs/quickstart.toml", "--together", "--rounds", "2"], "leave out --rounds"),
        (["rce", "--model", "tiny", "--dtypes", "bf16"], "bf16"),
        (["show", "pyproject.toml"], "line 1: not a line of JSON"),
    ],
)
def test_mistakes_get_one_line(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
