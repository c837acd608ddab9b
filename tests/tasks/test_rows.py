"""Question sets in the formats in which they are published. The rows have the fields of the real files."""

import gzip
import json

import pytest
from typer.testing import CliRunner

from memopd.cli import app
from memopd.retrieval import read_corpus
from memopd.tasks import Question
from memopd.tasks.files import read_passages, read_questions, read_split
from memopd.tasks.rows import passage_id

FILM = ("Kiss and Tell (1945 film)", "A comedy of 1945. It stars Shirley Temple.")
ACTRESS = ("Shirley Temple", "She was an actress. She was Chief of Protocol.")
OTHER = ("Velm", "A river.")
GOLD = (passage_id(*FILM), passage_id(*ACTRESS))

HOTPOTQA = {
    "_id": "5a8c",
    "question": "Which position did its star hold?",
    "answer": "Chief of Protocol",
    "type": "bridge",
    "level": "hard",
    "context": [
        [FILM[0], ["A comedy of 1945.", " It stars Shirley Temple."]],
        ["Velm", ["A river."]],
        [ACTRESS[0], ["She was an actress.", " She was Chief of Protocol."]],
    ],
    "supporting_facts": [[FILM[0], 1], [ACTRESS[0], 0], [ACTRESS[0], 1]],
}
EXPECTED = Question("5a8c", HOTPOTQA["question"], ("Chief of Protocol",), "bridge", (), GOLD)
TWO_WIKI = {  # its sentences do not begin with a space
    **HOTPOTQA,
    "context": [[title, [s.strip() for s in sentences]] for title, sentences in HOTPOTQA["context"]],
    "evidences": [[FILM[0], "star", ACTRESS[0]]],
    "evidences_id": [["Q1", "star", "Q2"]],
    "answer_id": "Q3",
    "entity_ids": "Q1_Q2",
}
HUB = {  # both, as columns
    **{name: value for name, value in HOTPOTQA.items() if name not in ("_id", "level")},
    "id": "5a8c",
    "context": {"title": [c[0] for c in HOTPOTQA["context"]], "sentences": [c[1] for c in HOTPOTQA["context"]]},
    "supporting_facts": {"title": [f[0] for f in HOTPOTQA["supporting_facts"]], "sent_id": [1, 0, 1]},
}
MUSIQUE = {
    "id": "3hop1__13548_13529",
    "paragraphs": [
        {"idx": i, "title": title, "paragraph_text": text, "is_supporting": (title, text) != OTHER}
        for i, (title, text) in enumerate((FILM, OTHER, ACTRESS))
    ],
    "question": "Which position did its star hold?",
    "question_decomposition": [{"id": 1, "question": "who?", "answer": "Temple", "paragraph_support_idx": 0}],
    "answer": "Chief of Protocol",
    "answer_aliases": ["Protocol chief", "Chief of Protocol"],
    "answerable": True,
}
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "Beyonc%C3%A9_Knowles",
            "paragraphs": [
                {
                    "context": "She sang.",
                    "qas": [
                        {
                            "id": "56be",
                            "question": "What did she do? ",
                            "answers": [{"text": "sang", "answer_start": 4}, {"text": "sang", "answer_start": 4}],
                        },
                        {"id": "none", "question": "Why?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}


def unlabelled(row):
    """As in the files of the test sets."""
    hidden = {"answer", "answer_aliases", "answerable", "supporting_facts", "evidences", "question_decomposition"}
    return {name: value for name, value in row.items() if name not in hidden}


def saved(path, value):
    lines = path.name.partition(".")[2].startswith("jsonl")
    text = "".join(json.dumps(row) + "\n" for row in value) if lines else json.dumps(value)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["q.json", "q.json.gz", "q.jsonl"])
@pytest.mark.parametrize("row", [HOTPOTQA, TWO_WIKI, HUB], ids=["hotpotqa", "2wiki", "hub"])
def test_hotpotqa_and_2wiki(tmp_path, row, name):
    path = saved(tmp_path / name, [row])
    assert read_questions(path) == [EXPECTED]
    assert {(title, text) for _, title, text in read_passages(path)} == {FILM, ACTRESS, OTHER}


def test_musique(tmp_path, caplog):
    unanswerable = {**MUSIQUE, "answerable": False}  # the same id: MuSiQue-Full has such pairs
    caplog.set_level("INFO")
    (question,) = read_questions(saved(tmp_path / "musique.jsonl", [MUSIQUE, unanswerable]))
    assert question.answers == ("Chief of Protocol", "Protocol chief")
    assert (question.id, question.kind, question.supporting) == ("3hop1__13548_13529", "3hop", GOLD)
    assert "left out 1 questions without an answer" in caplog.text


def test_squad(tmp_path):
    expected = Question("56be", "What did she do?", ("sang",), "", (), (passage_id("Beyoncé Knowles", "She sang."),))
    assert read_questions(saved(tmp_path / "squad.json", SQUAD)) == [expected]
    hub = {
        "id": "56be", "title": "Beyoncé_Knowles", "context": "She sang.", "question": "What did she do?",
        "answers": {"text": ["sang"], "answer_start": [4]},
    }  # fmt: skip
    assert read_questions(saved(tmp_path / "hub.jsonl", [hub])) == [expected]


def test_nq_open(tmp_path):
    rows = [{"question": "who", "answer": ["Oskel", "T. O."]}, {"question": "when", "answer": ["1871"]}]
    assert read_questions(saved(tmp_path / "nq.jsonl", rows)) == [
        Question("0", "who", ("Oskel", "T. O.")),
        Question("1", "when", ("1871",)),
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q.json", {"a": 1}, "must be a list of questions, or SQuAD's"),
        ("q.json", [1], "must be a list of questions"),
        ("q.json", {"data": [{"paragraphs": 3}]}, "data.paragraphs: must be a list of objects, got 3"),
        ("q.json", [{**HOTPOTQA, "context": [["a"]]}], r"q\.json: item 0: context: must be a list of pairs"),
        ("q.json", [{**HOTPOTQA, "context": [["a", "b"]]}], "context: must be a list of titles with sentences"),
        ("q.json", [{**HOTPOTQA, "answer": None}], "item 0: answer: missing; published test sets have none"),
        ("q.json", [{**HOTPOTQA, "answer": 3}], "item 0: answer: must be a list of strings"),
        ("q.jsonl", [{**MUSIQUE, "paragraphs": [{"title": "a"}]}], "paragraphs: paragraph_text: missing; it has title"),
        ("q.jsonl", [unlabelled(MUSIQUE)], "line 1: answer: missing; published test sets have none"),
        ("q.json", [unlabelled(TWO_WIKI)], "item 0: answer: missing; published test sets have none"),
        ("q.jsonl", [{"id": "x", "question": "who"}], "line 1: golden_answers: missing; the row has id, question"),
        ("q.json", [{**HOTPOTQA, "question": 3}], "item 0: question: must be a string, got 3"),
        ("q.json", [{"id": "x", "question": "who", "answers": "me"}], "answers: must be a list of strings, got .me"),
    ],
)
def test_a_malformed_row_is_named(tmp_path, name, value, message):
    with pytest.raises(ValueError, match=message):
        read_questions(saved(tmp_path / name, value))


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    """A null is none: a table that joins several sets has every column in every row."""
    row, null = {"id": "1", "question": "who", "answer_list": ["me"]}, {"golden_answers": None, "answer": None}
    for given in (row, row | null):
        with pytest.raises(ValueError, match=r".") as error:
            read_questions(saved(tmp_path / "mine.jsonl", [given]))
        assert str(error.value) == (
            f"{tmp_path / 'mine.jsonl'}: line 1: golden_answers: missing; the row has id, question, answer_list "
            "(docs/tasks.md says what is read)"
        )
    asked = {"id": "1", "query": "who", "answer": "me", "question": None}
    with pytest.raises(ValueError, match=r"item 0: question: missing; the row has id, query, answer \(docs"):
        read_questions(saved(tmp_path / "mine.json", [asked]))


def test_nulls_are_columns_of_other_rows(tmp_path):
    """As in a table that joins data sets."""
    nulls = dict.fromkeys({**HUB, **MUSIQUE, "golden_answers": 0, "metadata": 0, "reward_model": 0})
    plain = {"id": "x", "question": "who", "golden_answers": ["Oskel"]}
    rows = [{**nulls, **row} for row in (HUB, MUSIQUE, plain)]
    path = saved(tmp_path / "q.jsonl", rows)
    one, two, three = read_questions(path)
    assert (one, two.supporting, three) == (EXPECTED, GOLD, Question("x", "who", ("Oskel",)))
    assert {(title, text) for _, title, text in read_passages(path)} == {FILM, ACTRESS, OTHER}


def test_lines_in_a_json_file_are_recognised(tmp_path):
    path = saved(tmp_path / "q.jsonl", [HOTPOTQA, TWO_WIKI]).rename(tmp_path / "q.json")
    with pytest.raises(ValueError, match=r"q\.json: cannot be read as JSON: .*; a file of lines must end in \.jsonl"):
        read_questions(path)


def test_a_cut_file_is_named(tmp_path):
    (tmp_path / "q.json").write_text('[{"_id": ')
    with pytest.raises(ValueError, match=r"q\.json: cannot be read as JSON"):
        read_questions(tmp_path / "q.json")


def test_the_passages_of_a_set_become_its_corpus(tmp_path):
    one, two = saved(tmp_path / "hotpot.json", [HOTPOTQA]), saved(tmp_path / "musique.jsonl", [MUSIQUE])
    command = ["tasks", "passages", str(one), str(two), "-o", str(tmp_path / "corpus.jsonl")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "corpus.jsonl: 3 passages" in done.output
    corpus = {p.id: (p.title, p.text) for p in read_corpus(tmp_path / "corpus.jsonl")}
    assert [corpus[id] for id in EXPECTED.supporting] == [FILM, ACTRESS]
    assert "a new file" in str(CliRunner().invoke(app, command).exception)
    nq = saved(tmp_path / "nq.jsonl", [{"question": "who", "answer": ["Oskel"]}])
    done = CliRunner().invoke(app, ["tasks", "passages", str(nq), "-o", str(tmp_path / "none.jsonl")])
    assert "no passages come with these questions" in str(done.exception)


# ---- splits ----------------------------------------------------------------------------------------------------------


def test_a_part_of_a_split(tmp_path):
    nested = saved(tmp_path / "nested.json", {"nq": {"sft": ["a"], "rl": ["b"]}, "squad": {"sft": ["c"]}})
    flat = saved(tmp_path / "flat.json", {"sft": ["a", 7], "rl": ["b"]})
    assert read_split(nested, "sft") == {"a", "c"}
    assert read_split(flat, "sft") == {"a", "7"}


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"nq": {"sft": ["a"], "rl": ["a"]}}, "question 'a' is in 'sft' and in 'rl'"),
        ({"nq": {"sft": ["a"]}, "squad": {"rl": ["a"]}}, "question 'a' is in 'sft' and in 'rl'"),
        ({"nq": {"rl": ["a"]}}, "has no part 'sft'; its parts are rl"),
        ({"nq": "sft"}, "lists of ids"),
        ([1], "lists of ids"),
    ],
)
def test_a_split_that_cannot_be_used(tmp_path, split, message):
    with pytest.raises(ValueError, match=message):
        read_split(saved(tmp_path / "split.json", split), "sft")


def test_tasks_of_a_part_in_an_order_of_their_own(tmp_path):
    rows = [{"id": f"n{i}", "question": f"who is {i}", "golden_answers": ["x"]} for i in range(40)]
    nq = saved(tmp_path / "nq.jsonl", rows)
    split = saved(tmp_path / "split.json", {"nq": {"rl": [f"n{i}" for i in range(30)], "dev": ["n30", "n31"]}})

    def ids(*options):
        output = tmp_path / f"t{len(list(tmp_path.iterdir()))}.parquet"
        given = ["tasks", "build", nq, "-k", 2, "--split", split, "-o", output, *options]
        done = CliRunner().invoke(app, [str(a) for a in given])
        assert done.exit_code == 0, done.output
        return [q.id for q in read_questions(output)]

    assert ids("--part", "dev") == ["n30", "n31"]
    rl = ids("--part", "rl")
    assert rl == [f"n{i}" for i in range(30)]
    shuffled = ids("--part", "rl", "--seed", 1)
    assert sorted(shuffled) == sorted(rl)
    assert shuffled != rl
    assert shuffled == ids("--part", "rl", "--seed", 1)
