"""The command as a person meets it: quick to answer, one line when something is wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calls import mem1_calls

from memopd import __version__, cli
from memopd.record import read_episodes, write_episodes
from memopd.types import Call, Episode
from memopd.verify.families import tiny_model

ROOT = Path(__file__).parent.parent
MEMOPD = [sys.executable, "-m", "memopd.cli"]


def memopd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, on one thread: idle ones would only spin beside so small a model."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([*MEMOPD, *arguments], capture_output=True, text=True, env=environment, timeout=300)


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "episodes"
    write_episodes(path, [Episode(f"e{s}", "t", mem1_calls(s)) for s in range(2)])
    return path


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen2").save_pretrained(path)
    return path


def one_line(text: str) -> str:
    assert text.endswith("\n")
    assert "Traceback" not in text
    (line,) = text.splitlines()
    return line


# ---- quick --------------------------------------------------------------------------------------------------


HEAVY = ("torch", "transformers", "matplotlib", "pyarrow", "fastapi")  # a second or more, before anything is said
IMPORTED = """
import runpy, sys
sys.argv = {arguments!r}
try:
    runpy.run_module({module!r}, run_name="__main__")
except SystemExit as end:
    assert not end.code
print("imported:", *({heavy!r} & sys.modules.keys()), file=sys.stderr)
"""


def imported(module: str, *arguments: str) -> tuple[str, str]:
    """What `python -m MODULE ARGUMENTS` prints, and which heavy packages it imports for that."""
    script = IMPORTED.format(module=module, arguments=[module, *arguments], heavy=set(HEAVY))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr.removeprefix("imported:").strip()


@pytest.mark.parametrize(
    ("module", "verb"),
    [
        *(("memopd.cli", verb) for verb in ("", "audit", "draw", "import", "rollout", "train", "merge", "gateway")),
        ("paper", ""),
        *(("benchmarks", verb) for verb in ("", "actor", "show")),
    ],
)
def test_help_imports_nothing_heavy(module, verb):
    shown, heavy = imported(module, *verb.split(), "--help")
    assert "Usage" in shown
    assert heavy == ""


def test_a_heavy_import_is_noticed():
    assert imported("pyarrow.vendored.version")[1] == "pyarrow"


@pytest.mark.parametrize("room", ["", ".cli", ".types", ".compile", ".record", ".report"])
def test_what_needs_no_torch_imports_none(room):
    check = f"import sys, memopd{room}; assert not {{'torch', 'transformers', 'matplotlib'}} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


SHUT_DOWN = """
import atexit, runpy, sys
atexit.register(print, "shut down")
sys.argv = ["memopd", *{arguments!r}]
runpy.run_module("memopd.cli", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("ranks", "arguments", "ends_at_once"),
    [("2", ["--version"], True), ("1", ["--version"], False), ("2", ["no such command"], False)],
)
def test_a_rank_that_succeeded_ends_without_the_shutdown_of_the_interpreter(ranks, arguments, ends_at_once):
    """There a thread of gloo could abort the process. Whoever failed ends as usual, with the status of the error."""
    code = SHUT_DOWN.format(arguments=arguments)
    environment = {**os.environ, "WORLD_SIZE": ranks}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode == 0) is (arguments == ["--version"])
    assert (f"memopd {__version__}" in done.stdout) is (arguments == ["--version"])
    assert ("shut down" not in done.stdout) is ends_at_once


def test_the_console_script_is_this_command():
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="memopd")
    assert script.load() is cli.main


# ---- one line and exit status 2 -----------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["audit"], ["audit", "episodes"], ["audit", "episodes", "--demo"]])
def test_neither_demo_nor_episodes(arguments):
    shown = memopd(*arguments)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert one_line(shown.stderr) == "memopd: give EPISODES and --model, or --demo alone"


def test_a_missing_store_in_a_process_of_its_own(tmp_path):
    shown = memopd("audit", str(tmp_path / "none"), "--model", "any")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert one_line(shown.stderr) == f"memopd: {tmp_path / 'none'}: no such file or directory"


def test_a_debugger_gets_the_traceback():
    shown = memopd("audit", MEMOPD_DEBUG="1")
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr
    assert shown.stderr.rstrip().endswith("ValueError: give EPISODES and --model, or --demo alone")


@pytest.mark.parametrize("verb", ["audit", "draw"])
def test_a_missing_store(verb, call_main, tmp_path):
    rest = ["--model", "any"] if verb == "audit" else ["--episode", "e0", "-o", tmp_path / "pack.png"]
    status, out, err = call_main(verb, tmp_path / "none", *rest)
    assert (status, out) == (2, "")
    assert one_line(err) == f"memopd: {tmp_path / 'none'}: no such file or directory"


@pytest.mark.parametrize("name", ["folder", "no-such-organisation/no-such-model"])
def test_a_missing_model(name, call_main, store, tmp_path):
    status, out, err = call_main("audit", store, "--model", tmp_path / "none" if name == "folder" else name)
    assert (status, out) == (2, "")
    assert one_line(err).startswith("memopd: ")


def test_a_missing_teacher(call_main, store, saved_model, tmp_path):
    status, out, err = call_main("audit", store, "--model", saved_model, "--teacher", tmp_path / "none")
    assert (status, out) == (2, "")
    assert one_line(err).startswith("memopd: ")


def test_a_folder_that_is_no_model(call_main, store, tmp_path):
    status, out, err = call_main("audit", store, "--model", tmp_path)
    assert (status, out) == (2, "")
    assert one_line(err).startswith("memopd: ")


def test_a_mistyped_folder_is_not_asked_of_the_hub(call_main, store, saved_model, monkeypatch):
    monkeypatch.chdir(Path(saved_model).parent.parent)
    mistyped = f"{Path(saved_model).parent.name}/nosuch"
    status, _, err = call_main("audit", store, "--model", mistyped)
    assert status == 2
    assert one_line(err) == f"memopd: {mistyped}: there is no model here (no config.json)"


def test_weights_that_are_cut_short(call_main, store, saved_model, tmp_path):
    shutil.copytree(saved_model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, _, err = call_main("audit", store, "--model", tmp_path / "model")
    assert status == 2
    assert "its weights are cut short or damaged" in one_line(err)


def test_the_version(call_main):
    assert call_main("--version")[:2] == (0, f"memopd {__version__}\n")


def test_a_file_that_is_no_store(call_main, tmp_path):
    (tmp_path / "text.parquet").write_text("not Parquet, but long enough to look")
    status, _, err = call_main("audit", tmp_path / "text.parquet", "--model", "any")
    assert status == 2
    assert one_line(err).startswith(f"memopd: {tmp_path / 'text.parquet'}: not a Parquet file")


def test_an_unknown_kernel_or_precision(call_main):
    for option in ("--attention", "--dtype"):
        status, out, err = call_main("audit", "--demo", option, "none")
        assert (status, out) == (2, "")
        assert "Traceback" not in err
        assert option in err


# ---- audit --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def demo_audit():
    return memopd("audit", "--demo", "--json")


def test_the_demo_audit(demo_audit):
    assert demo_audit.returncode == 0
    assert "Traceback" not in demo_audit.stderr
    assert "audit: calls alone, float64 (" in demo_audit.stderr  # a line per stage where there is no terminal
    report = json.loads(demo_audit.stdout)  # nothing but JSON on stdout
    assert report["passed"] is True
    assert report["episodes"] == 16
    rows = {row["representation"]: row for row in report["representations"]}
    packed = rows["reconstructed packing"]
    assert rows["persistent history"]["p99_logprob"] >= 1000 * packed["p99_logprob"]
    assert rows["persistent history"]["false_clip"] > 0.05
    assert (packed["top1"], packed["top1_changed"], packed["false_clip"]) == (1.0, 0, 0.0)
    assert report["equivalence"]["error"] <= report["equivalence"]["tolerance"]


def test_the_demo_audit_has_a_recorded_gap(demo_audit):
    recorded = json.loads(demo_audit.stdout)["recorded"]
    assert recorded["decisions"] == 16 * 5 * 24
    assert recorded["mean"] < 1e-5
    assert recorded["p99"] < 1e-4


def test_an_audit_of_a_store(call_main, store, saved_model):
    status, out, _ = call_main("audit", store, "--model", saved_model, "--teacher", saved_model, "--json")
    report = json.loads(out)
    assert status == 0
    assert (report["model"], report["episodes"], report["calls"]) == (str(saved_model), 2, 8)
    calls = [f"call {which}" for which in ("0", "1", "2", "3 and later", "1 and later", "2 and later")]
    assert [t["calls"] for t in report["teacher"]] == [t["calls"] for t in report["student"]] == calls
    assert [a["arm"] for a in report["arms"]] == ["persistent history", "fork", "realign", "mem1-official"]
    assert report["recorded"] is None


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_an_audit_for_a_person(dtype, call_main, store, saved_model):
    status, out, _ = call_main("audit", store, "--model", saved_model, "--dtype", dtype, "--attention", "dense")
    assert status == 0
    assert dtype in out
    assert "Packing is equivalent" in " ".join(out.split())


def test_exit_status_1_when_packing_is_not_exact(call_main, store, tmp_path):
    """A model with weights that are no numbers is no proof of anything."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "model")
    status, out, _ = call_main("audit", store, "--model", tmp_path / "model")
    assert status == 1
    assert "NOT EQUIVALENT" in out


# ---- import and draw ----------------------------------------------------------------------------------------


def test_import(call_main, tmp_path):
    lines = [
        {"episode": "a", "prompt": [5, 6, 7], "completion": [8, 9], "logprobs": [-0.5, -2.25]},
        {"episode": "a", "prompt": [5, 8, 9, 3], "completion": [2], "episode_reward": 1},
        {"episode": "b", "prompt": [4], "completion": [2]},
    ]
    calls, output = tmp_path / "calls.jsonl", tmp_path / "store"
    calls.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, err = call_main("import", calls, "-o", output)
    assert (status, err) == (0, "")
    assert "2 episodes" in out
    a, b = read_episodes(output)
    assert a.calls == (Call([5, 6, 7], [8, 9], [-0.5, -2.25]), Call([5, 8, 9, 3], [2]))
    assert (a.reward, b.id) == (1.0, "b")
    status, _, err = call_main("import", calls, "-o", output)  # again: the store stays as it is
    assert status == 2
    assert one_line(err) == f"memopd: {output}: already has episode 'a'; remove it, or choose another -o"
    assert len(list(read_episodes(output))) == 2
    status, out, _ = call_main("import", calls, "-o", tmp_path / "another", "--json")
    assert (status, json.loads(out)) == (0, {"output": str(tmp_path / "another"), "episodes": 2})
    calls.write_text("")
    assert "contains no calls" in one_line(call_main("import", calls, "-o", tmp_path / "none")[2])
    assert not (tmp_path / "none").exists()


def test_import_names_the_line(call_main, tmp_path):
    calls = tmp_path / "calls.jsonl"
    calls.write_text('{"episode": "a", "prompt": [5], "completion": [8]}\n{"episode": "a", "prompt": [5]}\n')
    status, _, err = call_main("import", calls, "-o", tmp_path / "store")
    assert status == 2
    assert one_line(err).startswith(f"memopd: {calls}: line 2: episode 'a': call 1: completion: missing")
    assert not (tmp_path / "store").exists()


def test_draw(call_main, store, tmp_path):
    output = tmp_path / "pictures" / "pack.png"
    status, out, _ = call_main("draw", store, "--episode", "e1", "-o", output)
    assert status == 0
    assert out.replace("\n", "") == str(output)
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 1_000


def test_a_long_path_is_printed_on_one_line(call_main, store, tmp_path):
    output = tmp_path / ("long" * 30) / "pack.png"
    _, out, _ = call_main("draw", store, "--episode", "e1", "-o", output)
    assert out == f"{output}\n"


def test_draw_an_unknown_episode(call_main, store, tmp_path):
    status, out, err = call_main("draw", store, "--episode", "nobody", "-o", tmp_path / "pack.png")
    assert (status, out) == (2, "")
    assert one_line(err) == f"memopd: {store}: has no episode 'nobody'; it has e0, e1"
    assert not (tmp_path / "pack.png").exists()


def test_draw_needs_no_id_where_a_store_has_one_episode(call_main, store, tmp_path):
    status, out, err = call_main("draw", store, "-o", tmp_path / "pack.png")
    assert (status, out) == (2, "")
    assert one_line(err) == f"memopd: {store}: choose one of its 2 episodes with --episode: e0, e1"
    write_episodes(store, [Episode(f"f{s}", "t", mem1_calls(s)) for s in range(5)])
    line = one_line(call_main("draw", store, "-o", tmp_path / "pack.png")[2])
    assert line.endswith("choose one of its 7 episodes with --episode: e0, e1, f0, f1, f2, ...")
    write_episodes(tmp_path / "none.parquet", [])
    line = one_line(call_main("draw", tmp_path / "none.parquet", "-o", tmp_path / "pack.png")[2])
    assert line == f"memopd: {tmp_path / 'none.parquet'}: has no episodes"
    write_episodes(tmp_path / "one", [Episode("e0", "t", mem1_calls(0))])
    assert call_main("draw", tmp_path / "one", "-o", tmp_path / "pack.png")[0] == 0
    assert (tmp_path / "pack.png").exists()


def test_draw_an_unknown_format(call_main, store, tmp_path):
    status, _, err = call_main("draw", store, "--episode", "e0", "-o", tmp_path / "pack.nonsense")
    assert status == 2
    assert "nonsense" in one_line(err)
    assert sorted(os.listdir(tmp_path)) == ["episodes"]
