"""The example of an importer of one's own, through the command line: the store has its episodes, and audits them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memopd.record import read_episodes
from memopd.types import Call, Episode
from memopd.verify.families import tiny_model

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TABLE = """episode\ttask\treward\tprompt\tcompletion
e0\tt7\t1.0\t5 6 7\t8 9
e0\tt7\t1.0\t5 6 8 9 3\t2
e1\tt7\t0.0\t5 6 7\t4
"""


def memopd(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "memopd.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "calls.tsv"
    path.write_text(TABLE)
    return path


def test_a_table_becomes_a_store_that_can_be_audited(table, tmp_path, call_main):
    store = tmp_path / "episodes.parquet"
    shown = memopd("import", table, "--format", "own_importer:read", "-o", store)
    assert (shown.returncode, shown.stdout) == (0, f"{store}: 2 episodes\n"), shown.stderr
    assert list(read_episodes(store)) == [
        Episode("e0", "t7", [Call([5, 6, 7], [8, 9]), Call([5, 6, 8, 9, 3], [2])], 1.0),
        Episode("e1", "t7", [Call([5, 6, 7], [4])], 0.0),
    ]
    tiny_model("qwen2").save_pretrained(tmp_path / "model")
    status, out, err = call_main("audit", store, "--model", tmp_path / "model", "--json")
    assert status == 0, err
    assert json.loads(out)["passed"]


@pytest.mark.parametrize(
    ("format", "complaint"),
    [
        ("own_importer:reed", "--format: 'own_importer:reed': module 'own_importer' has no 'reed'"),
        ("mine:read", "--format: 'mine:read': No module named 'mine'; put its folder in PYTHONPATH, or run from it"),
        ("tsv", "--format: 'tsv' is not one of auto, calls, verifiers, verl, skyrl; write module:name for your own"),
        ("own_importer:csv", "--format: 'own_importer:csv' must be a function, got module"),
        ("builtins:str", "--format: 'builtins:str': result 0 must be an Episode, got str"),
        ("calls", "line 1: not a line of JSON: "),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(table, tmp_path, format, complaint):
    store = tmp_path / "episodes.parquet"
    shown = memopd("import", table, "--format", format, "-o", store)
    assert (shown.returncode, shown.stdout) == (2, "")
    (line,) = shown.stderr.splitlines()
    assert complaint in line
    assert not store.exists()


def test_a_row_that_is_wrong_is_named(table, tmp_path):
    table.write_text(TABLE.replace("5 6 8 9 3", "5 six"))
    shown = memopd("import", table, "--format", "own_importer:read", "-o", tmp_path / "episodes.parquet")
    assert shown.returncode == 2
    (line,) = shown.stderr.splitlines()
    assert line.startswith(f"memopd: {table}: --format: 'own_importer:read': invalid literal for int()")
    assert "'six'" in line
    assert not (tmp_path / "episodes.parquet").exists()
