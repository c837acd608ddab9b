"""Question sets on disk, in JSON or JSON lines as they are published, and the Parquet of Search-R1 and verl.

    {"id": "nq-0", "question": "who founded velmora works", "golden_answers": ["Tarin Oskel"], "metadata": {}}

`rows` lists the formats of a question.

A row of Parquet is a task of k questions: `data_source`, `prompt` (list of role, content), `ability`,
`reward_model.ground_truth.target` (a list of alias lists), `extra_info`. Ids, question texts, kinds and steps, which
the other columns cannot represent, are kept in `extra_info`, so that a file reads back as the tasks that were written.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from memopd.files import json_object, json_value, lines, whole
from memopd.tasks.rows import Row, aliases_of, encodable, ids_of, passages_in, question_of, short, squad_rows, text_of
from memopd.tasks.task import Question, Step, Task

logger = logging.getLogger(__name__)

_TEXT = pa.string()
_STEP = pa.struct({"query": _TEXT, "title": _TEXT, "fact": _TEXT})
_QUESTION = pa.struct(
    {"id": _TEXT, "text": _TEXT, "kind": _TEXT, "steps": pa.list_(_STEP), "supporting": pa.list_(_TEXT)}
)
_TARGET = pa.struct({"target": pa.list_(pa.list_(_TEXT))})
_SCHEMA = pa.schema(
    {
        "data_source": _TEXT,
        "prompt": pa.list_(pa.struct({"role": _TEXT, "content": _TEXT})),
        "ability": _TEXT,
        "reward_model": pa.struct({"style": _TEXT, "ground_truth": _TARGET}),
        "extra_info": pa.struct({"index": pa.int64(), "id": _TEXT, "questions": pa.list_(_QUESTION)}),
    }
)
HUB = "hub:"
_ASKED = re.compile(r"\bquestions?:", re.IGNORECASE)  # the word before the questions in common prompts
_CONTEXT = re.compile(r"(?:\n|(?<=\?))\s*Context:")  # the word before the documents in some of them
_AFTER_ASKED = re.compile(r"(?<=\?)\s*Context:")  # the same, surely after the questions
_BETWEEN = re.compile(r"(?<=\?);\s*")  # MEM1 joins questions, which end in "?", by "; "


def read_tasks(path: str | Path, skip_bad: bool = False) -> list[Task]:
    """Read the tasks of a .jsonl, .json (both also as .gz) or .parquet file, or of `hub:org/dataset[:config]:split`.

    A question of its own is a task of one; questions that a data set marks as unanswerable are left out. A malformed
    row raises a ValueError that names the file and the line (from 1), row or item (from 0). With `skip_bad`, malformed
    rows are skipped and their number is logged.
    """
    tasks: list[Task] = []
    places: dict[str, str] = {}
    bad: list[str] = []
    unanswerable = 0
    source = source_of(path)
    for number, (place, given) in enumerate(_rows(path)):
        try:
            row = json_object(given) if isinstance(given, bytes) else given
            task = _task(row, number, source)
            if task is None:
                unanswerable += 1
                continue
            if task.id in places:
                raise ValueError(f"task {task.id!r} is already on {places[task.id]}; ids must differ")
        except ValueError as error:
            if not skip_bad:
                raise ValueError(f"{path}: {place}: {error}") from None
            bad.append(f"{place}: {error}")
        else:
            places[task.id] = place
            tasks.append(task)
    if unanswerable:
        logger.info("%s: left out %d questions without an answer", path, unanswerable)
    if bad:
        logger.warning("%s: skipped %d of %d rows; the first: %s", path, len(bad), len(bad) + len(tasks), bad[0])
    return tasks


def read_passages(path: str | Path) -> Iterator[tuple[str, str, str]]:
    """The id, title and text of every passage that comes with the questions of a file. Passages may repeat."""
    for place, given in _rows(path):
        try:
            yield from passages_in(json_object(given) if isinstance(given, bytes) else given)
        except ValueError as error:
            raise ValueError(f"{path}: {place}: {error}") from None


def read_questions(path: str | Path, skip_bad: bool = False) -> list[Question]:
    """Read the questions of one data set, in order."""
    tasks = read_tasks(path, skip_bad)
    if len(sources := dict.fromkeys(task.source for task in tasks)) > 1:
        raise ValueError(f"{path}: contains several data sets ({', '.join(sources)}); read_tasks keeps them apart")
    return [question for task in tasks for question in task.questions]


def read_sets(
    paths: Sequence[str], names: Sequence[str] | None = None, skip_bad: bool = False, ids: frozenset[str] | None = None
) -> list[tuple[str, list[Question]]]:
    """Read the data sets of some files, each with its name. With `ids`, only these questions.

    `names` are the names of the data sets, one per file; by default a row or the name of its file says it. A file may
    contain several data sets.
    """
    if names and len(names) != len(paths):
        raise ValueError(f"--source was given {len(names)} times for {len(paths)} files; give one for each, or none")
    sets: list[tuple[str, list[Question]]] = []
    for i, path in enumerate(paths):
        of_file: dict[str, list[Question]] = {}
        for task in read_tasks(path, skip_bad):
            kept = (q for q in task.questions if ids is None or q.id in ids)
            of_file.setdefault(names[i] if names else task.source, []).extend(kept)
        sets += of_file.items()
    return sets


def read_split(path: Path, part: str) -> frozenset[str]:
    """The ids of one part of a split: {"nq": {"sft": ["nq-0", ...], "rl": [...]}, ...}, or one data set's parts alone.

    An id in two parts is an error, so questions of different parts are never the same.
    """
    try:
        given = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    sets = given.values() if isinstance(given, dict) and all(isinstance(v, dict) for v in given.values()) else [given]
    part_of: dict[str, str] = {}
    for parts in sets:
        if not isinstance(parts, dict) or not all(isinstance(ids, list) for ids in parts.values()):
            raise ValueError(f"{path}: must map each data set, or nothing else, to its parts, which are lists of ids")
        for name, id in ((name, str(id)) for name, ids in parts.items() for id in ids):
            if part_of.setdefault(id, name) != name:
                raise ValueError(f"{path}: question {id!r} is in {part_of[id]!r} and in {name!r}; remove one of them")
    if part not in part_of.values():
        raise ValueError(f"{path}: has no part {part!r}; its parts are {', '.join(sorted(set(part_of.values())))}")
    return frozenset(id for id, name in part_of.items() if name == part)


def divide(questions: Sequence[Question], shares: Mapping[str, int], seed: int, source: str) -> dict[str, list[str]]:
    """The ids of the questions of one data set, in parts of these shares, at random. Equal questions are in one part,
    and every part has a question.

    >>> asked = [Question(str(i), f"who {i // 2}", ("x",)) for i in range(8)]
    >>> divide(asked, {"sft": 2, "dev": 1, "test": 1}, 0, "nq")
    {'sft': ['6', '7', '0', '1'], 'dev': ['2', '3'], 'test': ['4', '5']}
    """
    by_text: dict[str, list[str]] = {}
    for question in questions:
        by_text.setdefault(" ".join(question.text.lower().split()), []).append(question.id)
    if len(by_text) < len(shares):
        raise ValueError(f"{source}: has {len(by_text)} different questions, too few for {len(shares)} parts")
    texts = list(by_text)
    random.Random(f"{seed}/{source}").shuffle(texts)
    ends = [0]
    for i in range(len(shares)):
        end = sum(list(shares.values())[: i + 1]) * len(texts) // sum(shares.values())
        least, most = ends[-1] + 1, len(texts) - (len(shares) - 1 - i)  # no part is empty, however small its share
        ends.append(min(max(end, least), most))
    parts = zip(shares, ends, ends[1:], strict=False)
    return {part: [id for text in texts[start:end] for id in by_text[text]] for part, start, end in parts}


def group(questions: Iterable[Question], k: int, source: str) -> list[Task]:
    """Group consecutive questions of one data set into tasks of k; drop the remainder.

    >>> asked = [Question(str(i), "who", ("x",)) for i in range(5)]
    >>> [task.id for task in group(asked, 2, "nq")]
    ['nq-q2-0', 'nq-q2-2']
    """
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}")
    asked = list(questions)
    parts = (tuple(asked[at : at + k]) for at in range(0, len(asked) - k + 1, k))
    return [Task(_task_id(source, k, part[0].id), part, source) for part in parts]


def write_tasks(path: str | Path, tasks: Iterable[Task], prompt_of: Callable[[Task], str]) -> int:
    """Write Parquet that Search-R1, verl and `read_tasks` can read, atomically. Return the number of tasks."""
    path = Path(path)
    if path.suffix != ".parquet":
        raise ValueError(f"{path}: tasks are written as Parquet; give a name that ends in .parquet")
    rows = [_written(index, task, prompt_of(task)) for index, task in enumerate(tasks)]
    ids = [row["extra_info"]["id"] for row in rows]
    if len(set(ids)) < len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise ValueError(
            f"{path}: task {twice!r} occurs twice; give the data sets different names, because task ids begin with them"
        )
    with whole(path) as partial:
        pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), partial)
    return len(rows)


def source_of(path: str | Path) -> str:
    """The default name of a data set: that of its file, or on the hub that of its configuration or itself.

    >>> source_of("data/nq.jsonl.gz"), source_of("hub:RUC-NLPIR/FlashRAG_datasets:hotpotqa:dev")
    ('nq', 'hotpotqa')
    """
    if str(path).startswith(HUB):
        name, config, _ = _hub_name(str(path))
        return config or name.rpartition("/")[2]
    return Path(path).name.partition(".")[0]


def _written(index: int, task: Task, prompt: str) -> Row:
    questions = [
        {
            "id": q.id,
            "text": q.text,
            "kind": q.kind,
            "steps": [asdict(step) for step in q.steps],
            "supporting": q.supporting,
        }
        for q in task.questions
    ]
    return {
        "data_source": task.source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "fact-reasoning",  # the value that Search-R1 uses
        "reward_model": {"style": "rule", "ground_truth": {"target": [q.answers for q in task.questions]}},
        "extra_info": {"index": index, "id": task.id, "questions": questions},
    }


def _rows(path: str | Path) -> Iterator[tuple[str, bytes | Row]]:
    """Every row with its place in the file. Lines of JSON come as bytes, so that the caller can skip bad ones."""
    name = str(path)
    if name.startswith(HUB):
        return _hub_rows(name)
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if name.endswith(".parquet"):
        return _parquet_rows(path)
    if name.endswith((".jsonl", ".jsonl.gz")):
        return ((f"line {number}", line) for number, line in lines(path))
    if name.endswith((".json", ".json.gz")):
        return _json_rows(path)
    raise ValueError(
        f"{path}: must end in .jsonl, .jsonl.gz, .json, .json.gz or .parquet (or be hub:org/dataset:split)"
    )


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """The items of a file that is one list, or of SQuAD's, which is nested."""
    value = json_value(path)
    try:
        rows = list(squad_rows(value["data"])) if isinstance(value, dict) and "data" in value else value
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'{path}: must be a list of questions, or SQuAD\'s {{"data": [...]}}; lines end in .jsonl')
    for number, row in enumerate(rows):
        yield f"item {number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: row {number}: cannot be read as Parquet: {error}") from None


def _hub_rows(path: str) -> Iterator[tuple[str, Row]]:
    name, config, split = _hub_name(path)
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{path}: reading from the hub needs `datasets`: pip install datasets") from None
    for number, row in enumerate(load_dataset(name, config or None, split=split)):
        yield f"row {number}", dict(row)


def _hub_name(path: str) -> tuple[str, str, str]:
    match path.removeprefix(HUB).split(":"):
        case [name, split] if name and split:
            return name, "", split
        case [name, config, split] if name and config and split:
            return name, config, split
    raise ValueError(f"{path}: must be hub:org/dataset:split or hub:org/dataset:config:split")


def _task(row: Row, number: int, source: str) -> Task | None:
    if row.get("reward_model") is None:
        question = question_of(row, number)
        if question is None:
            return None
        return Task(_task_id(source, 1, question.id), (question,), source)
    source = text_of(row, "data_source") if row.get("data_source") is not None else source
    targets = _targets(row)
    extra = row["extra_info"] if isinstance(row.get("extra_info"), dict) else {}
    if _is_ours(extra):
        if len(extra["questions"]) != len(targets):
            raise ValueError(f"extra_info.questions: {len(extra['questions'])} for {len(targets)} alias lists")
        asked = (_our_question(q, answers) for q, answers in zip(extra["questions"], targets, strict=True))
        return Task(text_of(extra, "id", "extra_info"), tuple(asked), source)
    # A row that another program wrote. The id of a row with several questions is not an id of any of them.
    k = len(targets)
    own = str(row["id"]) if k == 1 and isinstance(row.get("id"), str | int) else str(number)
    ids = [own] if k == 1 else [f"{number}.{i}" for i in range(k)]
    texts = _texts(row, extra, k)
    questions = (Question(*asked) for asked in zip(ids, texts, targets, strict=True))
    return Task(_task_id(source, k, own), tuple(questions), source)


def _task_id(source: str, k: int, first: str) -> str:
    """Ids depend on the questions, not on their place in the file, so two parts of a data set never share an id."""
    return f"{source}-q{k}-{first}" if source else f"q{k}-{first}"


def _our_question(row: Row, answers: tuple[str, ...]) -> Question:
    place = "extra_info.questions"
    if not isinstance(row["steps"], list) or not all(isinstance(step, dict) for step in row["steps"]):
        raise ValueError(f"{place}: steps: must be a list of searches, got {short(row['steps'])}")
    steps = (Step(*(text_of(s, name, f"{place}: steps") for name in ("query", "title", "fact"))) for s in row["steps"])
    supporting = ids_of(row.get("supporting"), f"{place}: supporting")
    id, text, kind = (text_of(row, name, place) for name in ("id", "text", "kind"))
    return Question(id, text, answers, kind, tuple(steps), supporting)


def _is_ours(extra: Row) -> bool:
    names = {"id", "text", "kind", "steps"}
    questions = extra.get("questions")
    return isinstance(questions, list) and all(isinstance(q, dict) and q.keys() >= names for q in questions)


def _targets(row: Row) -> list[tuple[str, ...]]:
    """One tuple of aliases for each question. A flat list holds the aliases of a single question."""
    name = "reward_model.ground_truth.target"
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, str):  # MEM1's files of single questions
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: must be a list of alias lists, got {short(value)}")
    if not any(isinstance(aliases, list) for aliases in value):
        return [aliases_of(value, name)]
    return [aliases_of(aliases, f"{name}[{i}]") for i, aliases in enumerate(value)]


def _texts(row: Row, extra: Row, k: int) -> list[str]:
    """Find the k questions of a row that another program wrote, in the columns that such programs use."""
    given = [holder.get(name) for holder in (row, extra) for name in ("questions", "question")]
    for value in (*given, *_after_instructions(row.get("prompt"))):
        if isinstance(value, str):
            value = [value.strip()] if k == 1 else _BETWEEN.split(value.strip())
        if isinstance(value, list) and len(value) == k and all(isinstance(t, str) and t for t in value):
            return [encodable(text, "question") for text in value]
    raise ValueError(f"cannot find its {k} question(s) in its prompt; add a column `questions` with a list of {k}")


def _after_instructions(prompt: Any) -> Iterator[str]:
    """What may be the questions in "<instructions> Questions: <questions>", the last place first.

    MEM1's instructions speak of "the initial questions:" before "the following questions:". A context may follow, and
    its documents may speak of a question, too: places in them come after all others.
    """
    messages = prompt if isinstance(prompt, list) else []
    contents = [m.get("content") for m in messages if isinstance(m, dict) and m.get("role") == "user"]
    if contents and isinstance(contents[-1], str):
        marks = list(_ASKED.finditer(contents[-1]))
        context = _AFTER_ASKED.search(contents[-1], marks[0].end()) if marks else None
        before = [mark for mark in marks if context is None or mark.start() < context.start()]
        for mark in [*reversed(before), *reversed(marks[len(before) :])]:
            yield _CONTEXT.split(contents[-1][mark.end() :], maxsplit=1)[0]
