"""Documents say what the result files say, and the examples run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memopd.bench.table import markdown
from memopd.bench.tables import load, tables_of

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "docs" / "results").glob("*-h200.jsonl"))


@pytest.mark.parametrize("results", RESULTS, ids=lambda p: p.name)
def test_benchmark_tables_are_those_of_the_result_files(results):
    document = (ROOT / "docs" / "benchmarks.md").read_text()
    for made in tables_of(load(results)):
        assert markdown(made) in document


def test_the_readme_quotes_the_actor_benchmark():
    readme = (ROOT / "README.md").read_text()
    for line in (ROOT / "docs" / "results" / "actor-h200.jsonl").read_text().splitlines():
        result = json.loads(line)
        if result["batch"] == 1:
            arms = {arm["name"]: arm for arm in result["arms"]}
            packed = arms["packed, cascade"]
            assert f"**{packed['speedup']:.2f}×** | {packed['limit']:.2f}× | {packed['memory']:.2f} |" in readme
            assert f"| {1e3 * arms['independent, varlen flash']['seconds']:.0f} ms |" in readme


def test_links_lead_somewhere():
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in document.read_text().split("](")[1:]:
            target = target.split(")")[0]
            assert target.startswith("http") or (document.parent / target).exists(), (document.name, target)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(example):
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
