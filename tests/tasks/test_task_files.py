"""Question sets: what is read, what is written, what is refused and where it stands."""

import gzip
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd.tasks import Question, Step, Task
from memopd.tasks.files import group, read_questions, read_tasks, source_of, write_tasks

DATA = Path(__file__).parent.parent.parent.parent / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason=f"needs the real questions in {DATA}")

GOOD = {"id": "nq-0", "question": "who founded it", "golden_answers": ["Tarin Oskel", "T. Oskel"]}
OTHER = {"id": "nq-1", "question": "when", "golden_answers": ["1871"], "metadata": {"type": "bridge"}}


def jsonl(path: Path, *lines: object) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_bytes(text.encode())
    return path


def ask(task: Task) -> str:
    return "Questions: " + "; ".join(marked(q.text) for q in task.questions)


def marked(text: str) -> str:
    return text if text.endswith("?") else f"{text}?"


def verl(target: object, content: str = "", **columns: object) -> dict:
    return {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": content}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": target}},
        "extra_info": {"split": "train", "index": 0},
        **columns,
    }


@pytest.mark.parametrize("name", ["nq.jsonl", "nq.jsonl.gz"])
def test_flashrag_lines(tmp_path, name):
    path = jsonl(tmp_path / name, GOOD, "", OTHER)
    first = Question("nq-0", "who founded it", ("Tarin Oskel", "T. Oskel"))
    second = Question("nq-1", "when", ("1871",), kind="bridge")
    assert read_questions(path) == [first, second]
    assert read_tasks(path) == [Task("nq-q1-nq-0", (first,), "nq"), Task("nq-q1-nq-1", (second,), "nq")]


def test_groups_are_consecutive_and_a_remainder_is_dropped():
    asked = [Question(str(i), "who?", ("x",)) for i in range(7)]
    tasks = group(asked, 3, "nq")
    assert [[q.id for q in task.questions] for task in tasks] == [["0", "1", "2"], ["3", "4", "5"]]
    assert [task.id for task in tasks] == ["nq-q3-0", "nq-q3-3"]
    assert {task.source for task in tasks} == {"nq"}
    assert group(asked, 8, "nq") == []
    assert len(group(asked, 7, "nq")) == 1
    with pytest.raises(ValueError, match="k must be 1 or more, got 0"):
        group(asked, 0, "nq")


TEXTS = st.text(max_size=20)
SPOKEN = st.text(min_size=1, max_size=20).filter(str.strip)
QUESTIONS = st.builds(
    Question,
    id=TEXTS,
    text=SPOKEN,
    answers=st.lists(SPOKEN, min_size=1, max_size=3).map(tuple),
    kind=TEXTS,
    steps=st.lists(st.builds(Step, TEXTS, TEXTS, TEXTS), max_size=2).map(tuple),
)
TASKS = st.lists(
    st.builds(Task, id=TEXTS, questions=st.lists(QUESTIONS, min_size=1, max_size=3).map(tuple), source=TEXTS),
    max_size=4,
    unique_by=lambda task: task.id,
)


@given(TASKS)
def test_what_is_written_is_read_back(tmp_path_factory, tasks):
    path = tmp_path_factory.mktemp("tasks") / "t.parquet"
    assert write_tasks(path, tasks, ask) == len(tasks)
    assert read_tasks(path) == tasks


def test_written_rows_have_the_schema_of_the_field(tmp_path):
    steps = (Step("it founder", "It", "It was founded by Tarin Oskel"),)
    task = Task(
        "t0", (Question("a", "who", ("Oskel", "T. O."), "one-hop", steps), Question("b", "when", ("1871",))), "nq"
    )
    write_tasks(tmp_path / "t.parquet", [task], lambda task: f"{task.k} questions")
    (row,) = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert list(row) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["data_source"] == "nq"
    assert row["prompt"] == [{"role": "user", "content": "2 questions"}]
    assert row["reward_model"]["ground_truth"]["target"] == [["Oskel", "T. O."], ["1871"]]
    assert row["extra_info"]["index"] == 0
    assert read_tasks(tmp_path / "t.parquet") == [task]


def test_tasks_appear_whole_or_not_at_all(tmp_path, monkeypatch):
    task = Task("t0", (Question("a", "who", ("x",)),))
    with pytest.raises(ZeroDivisionError):
        write_tasks(tmp_path / "t.parquet", [task], lambda task: str(1 // 0))
    with pytest.raises(ValueError, match="task 't0' occurs twice"):
        write_tasks(tmp_path / "t.parquet", [task, task], ask)
    with pytest.raises(ValueError, match=r"give a name that ends in \.parquet"):
        write_tasks(tmp_path / "t.jsonl", [task], ask)

    def full_disk(table, path):
        Path(path).write_bytes(b"PAR1")
        raise OSError("no space left")

    monkeypatch.setattr(pq, "write_table", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_tasks(tmp_path / "t.parquet", [task], ask)
    assert list(tmp_path.iterdir()) == []


MEM1 = "Follow this structure after <information> or the initial questions: <think> ... </think>.\n"
WHO, WHEN = Question("0.0", "who?", ("Oskel",)), Question("0.1", "when?", ("1871",))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # Search-R1: one question, a flat list of aliases; the columns of FlashRAG are still there.
        (
            verl(["Oskel", "T. O."], "Answer it. Question: who?\n", id="train_7", question="who?"),
            Task("nq-q1-train_7", (Question("train_7", "who?", ("Oskel", "T. O.")),), "nq"),
        ),
        # The same with the prompt alone.
        (
            verl(["Oskel"], "Think inside <think>. Question: who founded it?\n"),
            Task("nq-q1-0", (Question("0", "who founded it?", ("Oskel",)),), "nq"),
        ),
        # MEM1: questions joined by "; ".
        (
            verl([["Oskel"], ["1871", "in 71"]], "See the questions.\nAnswer the following questions: A; b?; when?\n"),
            Task("nq-q2-0", (Question("0.0", "A; b?", ("Oskel",)), Question("0.1", "when?", ("1871", "in 71"))), "nq"),
        ),
        # MEM1's own instructions speak of questions twice before they come; of one question, too.
        (
            verl([["Oskel"], ["1871"]], f"{MEM1}Answer the following questions: who?; when?\n"),
            Task("nq-q2-0", (WHO, WHEN), "nq"),
        ),
        (
            verl([["Oskel"]], f"{MEM1}Answer the following questions: who?\n"),
            Task("nq-q1-0", (Question("0", "who?", ("Oskel",)),), "nq"),
        ),
        # The last place that has as many questions as there are answers: a question may contain the word.
        (
            verl([["Oskel"], ["Ann"]], "Questions: who?; who asked the question: why?"),
            Task("nq-q2-0", (WHO, Question("0.1", "who asked the question: why?", ("Ann",))), "nq"),
        ),
        # Documents after the questions are no part of the last one.
        (
            verl([["Oskel"], ["1871"]], "Questions: who?; when?\nContext: Oskel founded it. Why? In 1871."),
            Task("nq-q2-0", (WHO, WHEN), "nq"),
        ),
        # They may speak of a question themselves; documents before the questions are only that.
        (
            verl([["Oskel"]], "Question: who founded it?\nContext: Why, is the question: how? Context: Who?"),
            Task("nq-q1-0", (Question("0", "who founded it?", ("Oskel",)),), "nq"),
        ),
        (
            verl([["Oskel"]], "Answer the question:\nContext: Oskel founded it. Why?\nQuestion: who?"),
            Task("nq-q1-0", (Question("0", "who?", ("Oskel",)),), "nq"),
        ),
        # MEM1's files of single questions have the answer alone.
        (
            verl("Oskel", "Question: who?\n"),
            Task("nq-q1-0", (Question("0", "who?", ("Oskel",)),), "nq"),
        ),
        # A list of questions says it best.
        (
            verl([["Oskel"], ["1871"]], "", extra_info={"questions": ["who", "when"]}),
            Task("nq-q2-0", (Question("0.0", "who", ("Oskel",)), Question("0.1", "when", ("1871",))), "nq"),
        ),
    ],
)  # fmt: skip
def test_rows_of_other_programs(tmp_path, row, expected):
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    assert read_tasks(tmp_path / "train.parquet") == [expected]
    assert read_tasks(jsonl(tmp_path / "train.jsonl", row)) == [expected]


@pytest.mark.parametrize(
    "content",
    [
        "who founded it?",  # where do the questions begin?
        "The questions: one?; two?; three?\nQuestion: here?",  # neither place has two
        "Questions: who?; when?; where?",  # three for two alias lists
        None,
    ],
)
def test_a_prompt_that_does_not_tell_is_refused(tmp_path, content):
    path = jsonl(tmp_path / "t.jsonl", verl([["Oskel"], ["1871"]], content))
    with pytest.raises(
        ValueError, match=r"t\.jsonl: line 1: cannot find its 2 question\(s\) .* add a column `questions`"
    ):
        read_tasks(path)


BAD = {
    "{": "not a line of JSON",
    "[1]": "must be a JSON object",
    '{"id": "x", "question": "who"}': "golden_answers: missing; the row has id, question",
    '{"id": "x", "question": "who", "golden_answers": "Oskel"}': "golden_answers: must be a list of strings",
    '{"id": "x", "question": "who", "golden_answers": []}': "golden_answers: must contain an answer",
    '{"id": "x", "question": "who", "golden_answers": [" "]}': "golden_answers: must contain an answer",
    '{"id": "x", "question": "who", "golden_answers": [3]}': "golden_answers: must be a list of strings, got .3.",
    '{"id": "x", "question": " ", "golden_answers": ["a"]}': "question 'x': text: must not be empty",
    '{"id": "x", "question": "\\ud800", "golden_answers": ["a"]}': "question: contains half of a surrogate pair",
    '{"question": "who", "golden_answers": ["a"]}': "id: missing; the row has question, golden_answers",
    '{"id": "nq-0", "question": "again", "golden_answers": ["a"]}': "task 'nq-q1-nq-0' is already on line 1",
    '{"reward_model": 3}': "reward_model.ground_truth.target: must be a list of alias lists, got null",
    json.dumps(verl([["a"], "b"])): r"reward_model.ground_truth.target\[1\]: must be a list of strings",
    json.dumps(verl([])): "reward_model.ground_truth.target: must be a list of alias lists",
    json.dumps(verl(["a"], "Question: who?", data_source=3)): "data_source: must be a string, got 3",
    json.dumps(verl([["a"]], extra_info={"id": "t", "questions": []})): "extra_info.questions: 0 for 1 alias lists",
    json.dumps(
        verl([["a"]], extra_info={"id": "t", "questions": [{"id": "x", "text": "who", "kind": "", "steps": [1]}]})
    ): "extra_info.questions: steps: must be a list of searches",
}


@pytest.mark.parametrize("line", BAD)
def test_a_malformed_line_is_named_and_skipped_only_when_asked(tmp_path, caplog, line):
    path = jsonl(tmp_path / "nq.jsonl", GOOD, line, OTHER)
    with pytest.raises(ValueError, match=rf"nq\.jsonl: line 2: {BAD[line]}"):
        read_tasks(path)
    assert [q.id for q in read_questions(path, skip_bad=True)] == ["nq-0", "nq-1"]
    assert "nq.jsonl: skipped 1 of 3 rows; the first: line 2: " in caplog.text


def test_bytes_that_are_no_text_are_a_malformed_line(tmp_path):
    path = tmp_path / "nq.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(ValueError, match="line 2: not a line of JSON"):
        read_tasks(path)
    assert len(read_tasks(path, skip_bad=True)) == 1


def test_a_malformed_row_of_parquet_is_named(tmp_path):
    rows = [verl(["a"], "Question: who?"), verl([""], "Question: when?"), verl(["c"], "Question: where?")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet: row 1: .*must contain an answer"):
        read_tasks(tmp_path / "t.parquet")
    assert [t.id for t in read_tasks(tmp_path / "t.parquet", skip_bad=True)] == ["nq-q1-0", "nq-q1-2"]


def test_a_damaged_file_is_not_skipped_over(tmp_path):
    path = jsonl(tmp_path / "nq.jsonl.gz", *({**GOOD, "id": str(i)} for i in range(1000)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"nq\.jsonl\.gz: line \d+: cannot be read"):
        read_tasks(path, skip_bad=True)
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"t\.parquet: row 0: cannot be read as Parquet"):
        read_tasks(tmp_path / "t.parquet", skip_bad=True)


def test_a_missing_file_and_an_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_tasks(tmp_path / "nq.jsonl")
    (tmp_path / "nq.csv").touch()
    with pytest.raises(ValueError, match=r"must end in \.jsonl, \.jsonl\.gz, \.json, \.json\.gz or \.parquet"):
        read_tasks(tmp_path / "nq.csv")


def test_a_file_of_two_data_sets_is_not_one_list_of_questions(tmp_path):
    rows = [verl(["a"], "Question: who?"), verl(["b"], "Question: when?", data_source="hotpotqa")]
    with pytest.raises(ValueError, match=r"contains several data sets \(nq, hotpotqa\)"):
        read_questions(jsonl(tmp_path / "both.jsonl", *rows))


def test_the_hub_is_asked_only_by_name(monkeypatch):
    asked = []
    load = lambda *names, split: asked.append((*names, split)) or [GOOD, verl(["a"], "Question: who?")]  # noqa: E731
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    tasks = read_tasks("hub:org/flash:nq:dev")
    assert [task.id for task in tasks] == ["nq-q1-nq-0", "nq-q1-1"]
    assert read_tasks("hub:org/flash:dev")[0].source == "flash"
    assert asked == [("org/flash", "nq", "dev"), ("org/flash", None, "dev")]
    for name in ("hub:org/flash", "hub:org/flash:", "hub::dev", "hub:a:b:c:d"):
        with pytest.raises(ValueError, match="must be hub:org/dataset:split or hub:org/dataset:config:split"):
            read_tasks(name)


def test_without_datasets_the_hub_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="reading from the hub needs `datasets`: pip install datasets"):
        read_tasks("hub:org/flash:dev")


def test_a_data_set_is_called_after_its_file():
    assert source_of("a.b/nq.jsonl.gz") == source_of(Path("nq.jsonl")) == "nq"


@real
@pytest.mark.parametrize(("name", "questions", "of_eight"), [("nq", 2655, 331), ("hotpotqa", 889, 111)])
def test_real_questions(tmp_path, name, questions, of_eight):
    asked = read_questions(DATA / f"{name}.jsonl.gz")
    assert len(asked) == questions
    tasks = group(asked, 8, name)
    assert len(tasks) == of_eight
    write_tasks(tmp_path / "q8.parquet", tasks, ask)
    assert read_tasks(tmp_path / "q8.parquet") == tasks
    # Somebody else's file of the same tasks: our extra_info gone, the questions from the prompt.
    table = pq.read_table(tmp_path / "q8.parquet").drop_columns("extra_info")
    pq.write_table(table, tmp_path / "theirs.parquet")
    read = [[q.text for q in task.questions] for task in read_tasks(tmp_path / "theirs.parquet")]
    assert read == [[marked(q.text) for q in task.questions] for task in tasks]
