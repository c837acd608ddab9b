"""Retrieval: a corpus, an index of it, and a service and client for an index."""

from memopd.retrieval.build import build_index
from memopd.retrieval.corpus import Passage, read_corpus, write_corpus
from memopd.retrieval.index import Hit, Index, IndexInfo, open_index, passages_of, read_info

__all__ = [
    "Hit",
    "Index",
    "IndexInfo",
    "Passage",
    "build_index",
    "open_index",
    "passages_of",
    "read_corpus",
    "read_info",
    "write_corpus",
]
