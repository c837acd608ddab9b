"""A small embedded world with its index and tokenizer, made once."""

from types import SimpleNamespace

import pytest

from memopd.retrieval import Passage, build_index, open_index, write_corpus
from memopd.world.demonstrations import texts_of
from memopd.world.encyclopedia import make_world
from memopd.world.tokenizer import train_tokenizer


def build(folder, passages):
    world = make_world(passages, seed=0)
    write_corpus(folder / "corpus.jsonl", (Passage(p.id, p.title, p.text) for p in world.passages))
    build_index(folder / "corpus.jsonl", folder / "index")
    return SimpleNamespace(
        world=world, index=open_index(folder / "index"), tokenizer=train_tokenizer(list(texts_of(world))[:4000])
    )


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    return build(tmp_path_factory.mktemp("world"), 400)


@pytest.fixture(scope="session")
def large(tmp_path_factory):
    return build(tmp_path_factory.mktemp("world"), 20_000)
