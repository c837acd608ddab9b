"""`memopd tasks build`, `memopd tasks split` and `memopd tasks show`."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from memopd.cli.tasks import app
from memopd.tasks.files import read_split, read_tasks


def questions(path: Path, count: int, first: int = 0) -> str:
    rows = [
        {"id": f"{path.stem}-{i}", "question": f"who is {i}", "golden_answers": [f"number {i}"]}
        for i in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def memopd_tasks(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)


def test_build_groups_each_data_set_by_itself(tmp_path):
    nq, hotpotqa = questions(tmp_path / "nq.jsonl", 5), questions(tmp_path / "hotpotqa.jsonl", 3)
    done = memopd_tasks("build", nq, hotpotqa, "-k", 2, "-o", tmp_path / "t.parquet")
    assert done.exit_code == 0, done.output
    assert "t.parquet: 3 tasks of 2 questions (2 of nq, 1 of hotpotqa); questions left over: 2" in done.output
    tasks = read_tasks(tmp_path / "t.parquet")
    assert [(t.source, [q.id for q in t.questions]) for t in tasks] == [
        ("nq", ["nq-0", "nq-1"]),
        ("nq", ["nq-2", "nq-3"]),
        ("hotpotqa", ["hotpotqa-0", "hotpotqa-1"]),
    ]
    (message,) = pq.read_table(tmp_path / "t.parquet").to_pylist()[0]["prompt"]
    assert message["role"] == "user"
    assert message["content"].strip().endswith("who is 0?; who is 1?")


def test_tasks_are_grouped_again_from_parquet(tmp_path):
    nq, hotpotqa = questions(tmp_path / "nq.jsonl", 5), questions(tmp_path / "hotpotqa.jsonl", 3)
    memopd_tasks("build", nq, hotpotqa, "-k", 1, "-o", tmp_path / "one.parquet")
    memopd_tasks("build", nq, hotpotqa, "-k", 2, "-o", tmp_path / "two.parquet")
    memopd_tasks("build", tmp_path / "one.parquet", "-k", 2, "-o", tmp_path / "again.parquet")
    assert read_tasks(tmp_path / "again.parquet") == read_tasks(tmp_path / "two.parquet")


def test_names_and_limits(tmp_path):
    path = questions(tmp_path / "train.jsonl", 9)
    assert memopd_tasks("build", path, "--source", "nq", "--limit", 2, "-o", tmp_path / "t.parquet").exit_code == 0
    assert [t.id for t in read_tasks(tmp_path / "t.parquet")] == ["nq-q2-train-0", "nq-q2-train-2"]
    done = memopd_tasks("build", path, path, "--source", "nq", "-o", tmp_path / "u.parquet")
    assert "--source was given 1 times for 2 files" in str(done.exception)
    done = memopd_tasks("build", path, path, "-o", tmp_path / "u.parquet")
    assert "'train-q2-train-0' occurs twice; give the data sets different names" in str(done.exception)


def test_tasks_that_exist_are_not_replaced(tmp_path):
    """Results name them: another -k or seed under the same name would change what was measured."""
    path, output = questions(tmp_path / "nq.jsonl", 4), tmp_path / "t.parquet"
    assert memopd_tasks("build", path, "-o", output).exit_code == 0
    before = output.read_bytes()
    assert "t.parquet: already exists" in str(memopd_tasks("build", path, "-k", 1, "-o", output).exception)
    assert output.read_bytes() == before


def test_malformed_rows_are_skipped_only_when_asked(tmp_path, caplog):
    path = questions(tmp_path / "nq.jsonl", 4)
    Path(path).write_text(Path(path).read_text() + "{\n")
    done = memopd_tasks("build", path, "-o", tmp_path / "t.parquet")
    assert isinstance(done.exception, ValueError)
    assert "nq.jsonl: line 5: not a line of JSON" in str(done.exception)
    assert not (tmp_path / "t.parquet").exists()
    assert memopd_tasks("build", path, "-o", tmp_path / "t.parquet", "--skip-bad").exit_code == 0
    assert "skipped 1 of 5 rows" in caplog.text


def test_too_few_questions_are_no_task(tmp_path):
    done = memopd_tasks("build", questions(tmp_path / "nq.jsonl", 7), "-k", 8, "-o", tmp_path / "t.parquet")
    assert "no task could be made: no data set has 8 questions" in str(done.exception)


def test_questions_of_one_kind(tmp_path):
    rows = [
        {"id": str(i), "question": f"who is {i}", "golden_answers": ["x"], "metadata": {"type": kind}}
        for i, kind in enumerate(["comparison", "bridge"] * 3)
    ]
    path = tmp_path / "hotpotqa.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = memopd_tasks("build", path, "--kind", "bridge", "-k", 3, "-o", tmp_path / "t.parquet")
    assert done.exit_code == 0, done.output
    (task,) = read_tasks(tmp_path / "t.parquet")
    assert [q.id for q in task.questions] == ["1", "3", "5"]
    done = memopd_tasks("build", path, "--kind", "bridges", "-o", tmp_path / "u.parquet")
    assert "no data set has 2 questions of kind 'bridges'" in str(done.exception)


@pytest.mark.parametrize("name", ["nq.jsonl", "t.parquet"])
def test_show(tmp_path, name):
    path = questions(tmp_path / "nq.jsonl", 4)
    memopd_tasks("build", path, "-k", 1, "-o", tmp_path / "t.parquet")
    done = memopd_tasks("show", tmp_path / name, "--rows", 1)
    assert done.exit_code == 0, done.output
    assert "4 tasks" in done.output
    assert "nq-q1-nq-0" in done.output
    assert "who is 0  ->  number 0" in done.output
    assert "who is 1" not in done.output


def split_of(path: Path) -> dict[str, frozenset[str]]:
    return {part: read_split(path, part) for part in ("sft", "rl", "dev", "test")}


def test_split_divides_every_data_set(tmp_path):
    nq, hotpotqa = questions(tmp_path / "nq.jsonl", 19), questions(tmp_path / "hotpotqa.jsonl", 16)
    done = memopd_tasks("split", nq, hotpotqa, "-o", tmp_path / "split.json")
    assert done.exit_code == 0, done.output
    counts = "17 questions for sft, 9 questions for rl, 4 questions for dev, 5 questions for test"
    assert f"split.json: {counts}" in done.output
    parts = split_of(tmp_path / "split.json")
    assert sorted(id for part in parts.values() for id in part) == sorted(
        [f"nq-{i}" for i in range(19)] + [f"hotpotqa-{i}" for i in range(16)]
    )
    assert {id.partition("-")[0] for id in parts["test"]} == {"nq", "hotpotqa"}
    built = memopd_tasks("build", nq, "--split", tmp_path / "split.json", "--part", "dev", "-o", tmp_path / "d.parquet")
    assert built.exit_code == 0, built.output
    assert {q.id for t in read_tasks(tmp_path / "d.parquet") for q in t.questions} <= parts["dev"]


def test_a_split_depends_on_its_seed_alone(tmp_path):
    nq = questions(tmp_path / "nq.jsonl", 40)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert memopd_tasks("split", nq, "--seed", seed, "-o", tmp_path / name).exit_code == 0
    a, b, c = (split_of(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c


@pytest.mark.parametrize("count", [4, 5, 6, 7, 8])
def test_no_part_is_empty_however_few_the_questions(count, tmp_path):
    """An empty dev part would only show when something is built of it."""
    nq = questions(tmp_path / "nq.jsonl", count)
    assert memopd_tasks("split", nq, "-o", tmp_path / "split.json").exit_code == 0
    sizes = {part: len(ids) for part, ids in split_of(tmp_path / "split.json").items()}
    assert min(sizes.values()) == 1
    assert sum(sizes.values()) == count
    assert sizes["sft"] >= sizes["rl"] >= sizes["dev"]


def test_equal_questions_are_in_one_part(tmp_path):
    rows = [{"id": f"q{i}", "question": f"Who  is {i % 10}", "golden_answers": ["x"]} for i in range(20)]
    rows += [{"id": f"r{i}", "question": f"who is {i}", "golden_answers": ["x"]} for i in range(10)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert memopd_tasks("split", tmp_path / "q.jsonl", "-o", tmp_path / "split.json").exit_code == 0
    for part in split_of(tmp_path / "split.json").values():
        assert {id[1:] for id in part if id[0] == "r"} == {str(int(id[1:]) % 10) for id in part}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--parts", "sft=4,rl"], "--parts takes names with whole numbers above 0"),
        (["--parts", "sft=0,rl=1"], "--parts takes names with whole numbers above 0"),
        (["--parts", "rl=1,rl=2"], "--parts names a part twice"),
        (["--parts", "a=1,b=1,c=1,d=1"], "nq: has 3 different questions, too few for 4 parts"),
    ],
)
def test_splits_that_cannot_be_made(tmp_path, options, why):
    done = memopd_tasks("split", questions(tmp_path / "nq.jsonl", 3), *options, "-o", tmp_path / "split.json")
    assert why in str(done.exception)
    assert not (tmp_path / "split.json").exists()


def test_a_split_is_never_overwritten_and_needs_ids_of_its_own(tmp_path):
    nq = questions(tmp_path / "nq.jsonl", 9)
    (tmp_path / "split.json").write_text("kept")
    assert "already exists" in str(memopd_tasks("split", nq, "-o", tmp_path / "split.json").exception)
    assert (tmp_path / "split.json").read_text() == "kept"
    twice = memopd_tasks("split", nq, nq, "--source", "a", "--source", "b", "-o", tmp_path / "other.json")
    assert "2 questions have the id 'nq-0'" in str(twice.exception)
