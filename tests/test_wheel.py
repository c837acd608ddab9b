"""The wheel holds the library alone: neither the paper nor the benchmarks, and nothing that needs them."""

import ast
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTSIDE = {"paper", "benchmarks", "tests", "examples"}


def outside_imports(source: str) -> set[str]:
    """The folders beside the library that a module imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found & OUTSIDE


def test_the_wheel_is_made_of_the_library():
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build == {"targets": {"wheel": {"packages": ["src/memopd"]}}}


def test_a_wheel_that_is_built(tmp_path):
    """Where the build tool is installed; in an isolated build it is downloaded."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling")
    (file,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(file) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == {"memopd"}


def test_the_library_imports_nothing_beside_it():
    modules = sorted((ROOT / "src" / "memopd").rglob("*.py"))
    assert len(modules) > 80
    assert {str(m.relative_to(ROOT)): found for m in modules if (found := outside_imports(m.read_text()))} == {}


def test_such_an_import_is_noticed():
    assert outside_imports("def f():\n    from benchmarks.shapes import SHAPES\n    import paper.page, json") == {
        "benchmarks",
        "paper",
    }
