"""Passages of few words in few lengths, so that most scores are shared, under ids in no order."""

import random

from memopd.retrieval import Passage

WORDS = ["amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "heath", "inlet", "jetty", "kelp", "lagoon"]


def tied_passages(count: int, seed: int = 0) -> list[Passage]:
    rng = random.Random(seed)
    ids = rng.sample(range(10 * count), count)
    return [Passage(f"p{id}", " ".join(rng.choices(WORDS, k=2)), " ".join(rng.choices(WORDS, k=5))) for id in ids]


def tied_queries(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in range(count)]
