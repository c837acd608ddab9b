"""The benchmark runs, on a small corpus, and its numbers mean something."""

import gzip
import json
import math

import pytest

from benchmarks.corpus import synthetic_passages, write_synthetic
from benchmarks.recall import run_recall
from benchmarks.retrieval import run_retrieval
from memopd.retrieval import read_corpus


def test_a_synthetic_corpus():
    memopd, service, bm25s = run_retrieval(passages=400, queries=40)
    assert [r.retriever for r in (memopd, service, bm25s)] == ["memopd", "memopd service, 32 clients", "bm25s"]
    for result in (memopd, service, bm25s):
        assert (result.passages, result.queries) == (400, 40)
        assert 0 < result.p50 <= result.p99
        assert result.queries_per_second > 0
        assert result.recall_10 > 0.9  # eight words of a passage find it
        assert json.loads(json.dumps(result.as_dict()))["retriever"] == result.retriever
    assert (memopd.recall_3, memopd.recall_10) == (service.recall_3, service.recall_10)
    assert math.isnan(service.build_seconds)


def test_a_corpus_of_ones_own(tmp_path):
    asked = write_synthetic(tmp_path / "corpus.jsonl", 100, 5)
    rows = [{"question": a.query, "metadata": {"supporting_ids": [*a.wanted, "nowhere"]}} for a in asked]
    with gzip.open(tmp_path / "questions.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    results = list(run_retrieval(tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl.gz"))
    assert [(r.passages, r.queries, r.recall_10) for r in results] == [(100, 5, 0.5)] * 3
    with pytest.raises(ValueError, match="a corpus and questions, or neither"):
        next(run_retrieval(tmp_path / "corpus.jsonl"))


def test_queries_come_from_all_over(tmp_path):
    asked = write_synthetic(tmp_path / "corpus.jsonl", 1000, 10)
    assert [min(a.wanted) for a in asked] == [str(i) for i in range(0, 1000, 100)]
    corpus = {p.id: p for p in read_corpus(tmp_path / "corpus.jsonl")}
    for one in asked:
        passage = corpus[min(one.wanted)]
        assert set(one.query.split()) <= set(f"{passage.title} {passage.text}".split())


def test_passages_are_the_same_each_time_and_differ():
    first, again = (list(synthetic_passages(300)) for _ in range(2))
    assert first == again
    assert len({p.text for p in first}) == 300


def test_recall(tmp_path):
    asked = write_synthetic(tmp_path / "corpus.jsonl", 100, 5)
    rows = [
        {"id": str(i), "question": a.query, "golden_answers": ["x"], "metadata": {"supporting_ids": [*a.wanted, *more]}}
        for i, (a, more) in enumerate(zip(asked, [["nowhere"], [], [], [], []], strict=True))
    ]
    questions = tmp_path / "set.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = list(run_recall([tmp_path / "corpus.jsonl"], [str(questions)], None, 20, 5, 0))
    assert [(r.index_kind, r.query, r.passages, r.questions) for r in results] == [
        ("lexical", "question", 19, 5),  # one of the gold passages is nowhere
        ("lexical", "keywords", 19, 5),
    ]
    assert [(r.any_3, r.all_3) for r in results] == [(1.0, 0.8)] * 2
    with pytest.raises(ValueError, match="the questions have 6 gold passages; take more"):
        list(run_recall([tmp_path / "corpus.jsonl"], [str(questions)], None, 3, 5, 0))
