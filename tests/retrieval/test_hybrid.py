"""The hybrid index against a fusion by hand of the two that it contains."""

import pytest
from serving import serving
from test_dense import tiny_encoder
from ties import tied_passages, tied_queries

from memopd.retrieval import Hit, Passage, build_index, open_index, read_info, write_corpus
from memopd.retrieval.dense import DenseIndex
from memopd.retrieval.hybrid import fuse
from memopd.retrieval.lexical import LexicalIndex
from memopd.retrieval.server import create_app

PASSAGES = tied_passages(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    build_index(folder / "corpus.jsonl", folder / "index", "hybrid", tiny_encoder(folder / "tiny"))
    return folder / "index"


@pytest.fixture(scope="module")
def index(folder):
    return open_index(folder)


def ranking(*ids):
    return [Hit(Passage(id, "", ""), 1.0) for id in ids]


def test_fusion_by_hand():
    fused = fuse([ranking("a", "b", "c"), ranking("c", "d")])
    assert [(hit.passage.id, hit.score) for hit in fused] == [
        ("c", pytest.approx(1 / 63 + 1 / 61)),
        ("a", pytest.approx(1 / 61)),
        ("b", pytest.approx(1 / 62)),  # as d: ties go by id
        ("d", pytest.approx(1 / 62)),
    ]
    assert fuse([[], []]) == []


def test_both_lists_are_fused(folder, index):
    lexical, dense = LexicalIndex(folder / "lexical"), DenseIndex(folder / "dense")
    queries = tied_queries(20)
    both = zip(lexical.search(queries, 100), dense.search(queries, 100), strict=True)
    found = index.search(queries, 10)
    expected = [fuse(pair)[:10] for pair in both]
    assert [[h.passage.id for h in hits] for hits in found] == [[h.passage.id for h in hits] for hits in expected]
    alone = [[h.passage.id for h in hits] for hits in lexical.search(queries, 10)]
    assert [[h.passage.id for h in hits] for hits in found] != alone


def test_a_shorter_answer_begins_a_longer_one(index):
    for query in tied_queries(5):
        (long,) = index.search([query], 300)
        assert 100 <= len(long) <= 200
        for k in (1, 3, 50):
            assert index.search([query], k)[0] == long[:k]


def test_nothing_to_look_for_finds_nothing(index):
    assert index.search([], 3) == []
    empty, some = index.search(["", "amber"], 3)
    assert (empty, len(some)) == ([], 3)


def test_it_is_served(index):
    with serving(create_app(index)) as url:
        assert open_index(url).search(["amber basin"], 5) == index.search(["amber basin"], 5)


def test_what_it_was_built_with(folder):
    info = read_info(folder)
    assert (info.kind, info.passages) == ("hybrid", 300)
    assert {"fusion", "k1", "model", "query"} <= info.settings.keys()
    assert {"memopd", "tantivy", "faiss"} <= info.versions.keys()


def test_passages_are_looked_up_by_id(index):
    assert index.passages([PASSAGES[7].id, "none"]) == {PASSAGES[7].id: PASSAGES[7]}


def test_it_needs_a_model(folder, tmp_path):
    with pytest.raises(ValueError, match="--model"):
        build_index(folder.parent / "corpus.jsonl", tmp_path / "index", "hybrid")
    with pytest.raises(ValueError, match="--query-prefix"):
        build_index(folder.parent / "corpus.jsonl", tmp_path / "index", prefixes=("a", None))
