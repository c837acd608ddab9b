"""Measures recall: the lexical index beside the dense and the hybrid one, on the same passages and questions."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memopd.agent.demonstrator import keywords
from memopd.retrieval import Index, Passage, build_index, open_index, read_corpus, write_corpus
from memopd.retrieval.dense import DenseIndex
from memopd.retrieval.lexical import LexicalIndex
from memopd.tasks import Question
from memopd.tasks.files import read_questions, source_of

_K = 3  # what an agent reads


@dataclass(frozen=True, slots=True)
class RecallResult:
    index_kind: str
    passages: int
    data_set: str
    questions: int
    query: str  # "question", or "keywords", which are those of `memopd demonstrate`
    any_3: float  # the share of questions with a gold passage among the first three
    all_3: float  # the share with all of them

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_recall(
    corpora: Sequence[Path], questions: Sequence[str], model: str | None, passages: int | None, sample: int, seed: int
) -> Iterator[RecallResult]:
    """Compare on a random sample of each data set, and on `passages` of the corpus: the gold ones and random others."""
    asked = {source_of(path): _sampled(path, sample, seed) for path in questions}
    with TemporaryDirectory(prefix="memopd-bench-") as scratch:
        folder = Path(scratch)
        gold = {id for some in asked.values() for question in some for id in question.supporting}
        count = write_corpus(folder / "corpus.jsonl", _chosen(corpora, gold, passages, seed))
        for kind, index in _indexes(folder, model):
            for name, some in asked.items():
                for query in ("question", "keywords"):
                    any_3, all_3 = _recall(index, some, query)
                    yield RecallResult(kind, count, name, len(some), query, any_3, all_3)


def _sampled(path: str, sample: int, seed: int) -> list[Question]:
    questions = [q for q in read_questions(path) if q.supporting]
    if not questions:
        raise ValueError(f"{path}: no question names its passages (metadata.supporting_ids)")
    return random.Random(seed).sample(questions, min(sample, len(questions)))


def _chosen(corpora: Iterable[Path], gold: set[str], passages: int | None, seed: int) -> list[Passage]:
    every = [passage for path in corpora for passage in read_corpus(path)]
    if passages is None:
        return every
    if passages < len(gold):
        raise ValueError(f"--passages {passages}: the questions have {len(gold)} gold passages; take more")
    others = [passage.id for passage in every if passage.id not in gold]
    kept = gold | set(random.Random(seed).sample(others, min(passages - len(gold), len(others))))
    return [passage for passage in every if passage.id in kept]


def _indexes(folder: Path, model: str | None) -> Iterator[tuple[str, Index]]:
    """Every kind of index. A hybrid one contains the two others, so nothing is embedded twice."""
    build_index(folder / "corpus.jsonl", folder / "index", "lexical" if model is None else "hybrid", model)
    if model is None:
        yield "lexical", open_index(folder / "index")
        return
    yield "lexical", LexicalIndex(folder / "index" / "lexical")
    yield "dense", DenseIndex(folder / "index" / "dense")
    yield "hybrid", open_index(folder / "index")


def _recall(index: Index, asked: Sequence[Question], query: str) -> tuple[float, float]:
    found = index.search([q.text if query == "question" else keywords(q.text) for q in asked], _K)
    hits = [len({hit.passage.id for hit in some} & set(q.supporting)) for q, some in zip(asked, found, strict=True)]
    return (
        sum(hit > 0 for hit in hits) / len(asked),
        sum(hit == len(q.supporting) for q, hit in zip(asked, hits, strict=True)) / len(asked),
    )
