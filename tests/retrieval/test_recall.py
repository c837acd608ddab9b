"""Real questions on real passages: what share of the passages that hold the answer is among the first k."""

import gzip
import json
from pathlib import Path

import pytest

from memopd.retrieval import build_index, open_index, read_corpus, write_corpus

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs the real questions and passages of ../shared/data")


def questions(name):
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def recall(index, asked, k):
    """Averaged over the questions, each the share of its own supporting passages."""
    shares = []
    for row, hits in zip(asked, index.search([row["question"] for row in asked], k), strict=True):
        wanted = set(row["metadata"]["supporting_ids"])
        shares.append(len(wanted & {hit.passage.id for hit in hits}) / len(wanted))
    return sum(shares) / len(shares)


def test_hotpotqa_on_its_own_passages(tmp_path):
    passages = [p for p in read_corpus(DATA / "corpus.jsonl.gz") if p.id.startswith("hp")]
    assert write_corpus(tmp_path / "corpus.jsonl", passages) == 8701
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    index, asked = open_index(tmp_path / "index"), questions("hotpotqa")
    assert len(asked) == 889
    for k, least in ((3, 0.66), (5, 0.74), (10, 0.86)):
        assert recall(index, asked, k) >= least


def test_nq_on_the_whole_corpus(tmp_path):
    """The title's weight helps here most; without it recall@3 is .856."""
    build_index(DATA / "corpus.jsonl.gz", tmp_path / "index")
    assert recall(open_index(tmp_path / "index"), questions("nq"), 3) >= 0.87
