"""BM25 as written down, in an order that no build can change, for any text as a query."""

import math
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ties import WORDS, tied_passages, tied_queries

from benchmarks.corpus import write_synthetic
from memopd.retrieval import Passage, build_index, lexical, open_index, write_corpus


def made(folder, passages, name="index"):
    write_corpus(folder / "corpus.jsonl", passages)
    build_index(folder / "corpus.jsonl", folder / name)
    return open_index(folder / name)


def answers(index, queries, k):
    return [[(hit.passage.id, hit.score) for hit in hits] for hits in index.search(queries, k)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return made(tmp_path_factory.mktemp("tied"), tied_passages(3000))


def bm25(passages, query, k1=1.2, b=0.75, title=0.25):
    """By the formula: contents, plus a quarter of the title."""
    scores = Counter()
    for weight, field in ((1, lambda p: f"{p.title} {p.text}".split()), (title, lambda p: p.title.split())):
        counts = [Counter(field(p)) for p in passages]
        mean = sum(map(Counter.total, counts)) / len(counts)
        for word in set(query.split()):
            having = sum(word in c for c in counts)
            idf = math.log(1 + (len(counts) - having + 0.5) / (having + 0.5))
            for passage, c in zip(passages, counts, strict=True):
                length = 1 - b + b * c.total() / mean
                if c[word]:
                    scores[passage.id] += weight * idf * (k1 + 1) * c[word] / (c[word] + k1 * length)
    return scores


def test_scores_are_bm25(tied):
    passages = tied_passages(3000)
    for query in tied_queries(20):
        expected = bm25(passages, query)
        best = sorted(expected.values(), reverse=True)[:10]
        (hits,) = tied.search([query], 10)
        assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-5)
        assert [hit.score for hit in hits] == pytest.approx([expected[hit.passage.id] for hit in hits], rel=1e-5)


def test_a_passage_comes_back_whole(tmp_path):
    passage = Passage("7", 'The "Quoted" (song)', "Line one.\nLine two, naïve — 日本.")
    assert made(tmp_path, [passage]).search(["quoted song"], 3)[0][0].passage == passage


def test_words_are_stemmed_and_accents_do_not_matter(tmp_path):
    index = made(tmp_path, [Passage("7", "Café Müller", "Dancers were dancing."), Passage("8", "Other", "Nothing.")])
    for query in ("cafe", "MULLER", "dance", "Müller's?"):
        assert [hit.passage.id for hit in index.search([query], 3)[0]] == ["7"]


# ---- ties -----------------------------------------------------------------------------------------------------------


def test_ties_are_broken_by_id_also_at_the_cut(tied):
    """Every answer is the head of the longest one, which is sorted by score and id."""
    queries = tied_queries(40)
    whole = answers(tied, queries, 5000)
    assert sum(len(all_) - len({score for _, score in all_}) for all_ in whole) > 5_000  # ties there are
    for all_ in whole:
        assert all_ == sorted(all_, key=lambda hit: (-hit[1], hit[0]))
    for k in (1, 3, 10, 100):
        assert answers(tied, queries, k) == [all_[:k] for all_ in whole]


def test_two_builds_answer_alike(tied, tmp_path):
    queries = tied_queries(300)
    again = made(tmp_path, tied_passages(3000))
    assert answers(tied, queries, 5) == answers(again, queries, 5)


def test_so_do_builds_in_another_order_and_in_several_segments(tied, tmp_path):
    queries = tied_queries(300)
    several = in_segments(tmp_path, sorted(tied_passages(3000), key=lambda p: p.text))
    for k in (1, 5, 50):
        assert answers(tied, queries, k) == answers(several, queries, k)


def test_tantivys_own_order_differs_from_build_to_build(tmp_path):
    """What the test above is for: the order of segments is random, so that two builds are alike once in 24."""
    first, *others = (tmp_path / str(build) for build in range(10))
    assert any(own_order(other) != own_order(first) for other in others)


@cache
def own_order(folder):
    folder.mkdir()
    index = in_segments(folder, tied_passages(200))
    found = [index._searcher.search(index._any_of([word]), 5).hits for word in WORDS]
    return [[index._passage(address).id for _, address in hits] for hits in found]


def in_segments(folder, passages, segments=4):
    """As a corpus too large for the writer's buffer would lie on disk."""
    writer = lexical._writer(folder)
    for part in range(segments):
        for passage in passages[part::segments]:
            writer.add_document(lexical._document(passage))
        writer.commit()
    writer.wait_merging_threads()
    index = lexical.LexicalIndex(folder)
    assert index._searcher.num_segments == segments
    return index


# ---- any text is a query --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", " \n", "the of and", "?!", "\x00", "zzz", "a" * 10_000_000])
def test_nothing_to_look_for_finds_nothing(tied, query):
    assert tied.search([query], 3) == [[]]


@pytest.mark.parametrize(
    "query", ['amber "', "amber AND (", "title:amber^", "amber:[", "-amber", "amber\ud800", "(amber"]
)
def test_punctuation_means_nothing(tied, query):
    assert answers(tied, [query], 3) == answers(tied, ["amber"], 3)


def test_of_a_long_query_the_start_is_read(tied):
    assert answers(tied, ["amber " * 2_000_000 + "basin"], 3) == answers(tied, ["amber"], 3)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_no_text_raises(query):
    terms = lexical._analyzer().analyze(lexical.readable(query))
    assert all(isinstance(term, str) for term in terms)


def test_queries_keep_their_order(tied):
    queries = tied_queries(100)
    assert tied.search(queries, 3) == [tied.search([query], 3)[0] for query in queries]
    assert tied.search([], 3) == []


@pytest.mark.parametrize("k", [0, -1])
def test_k_must_be_positive(tied, k):
    with pytest.raises(ValueError, match="k must be 1 or more"):
        tied.search(["amber"], k)


@pytest.mark.slow
def test_a_buffer_too_small_changes_no_answer(tmp_path, monkeypatch):
    """The smallest buffer: the writer cuts segments on its own, and merges them when it likes."""
    asked = [one.query for one in write_synthetic(tmp_path / "corpus.jsonl", 250_000, 300)]
    build_index(tmp_path / "corpus.jsonl", tmp_path / "one")
    monkeypatch.setattr(lexical, "_WRITER_BYTES", 15_000_000)
    build_index(tmp_path / "corpus.jsonl", tmp_path / "several")
    one, several = open_index(tmp_path / "one"), open_index(tmp_path / "several")
    assert one._searcher.num_segments == 1 < several._searcher.num_segments
    for queries in (asked, [query.split()[0] for query in asked]):  # one word alone has many ties
        assert answers(one, queries, 10) == answers(several, queries, 10)
