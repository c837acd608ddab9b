"""What sequences repeat of each other: against parts worked out by hand, and put together again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memopd.report.pool import LEAST, WINDOW, Part, Pool


def ids(*ranges):
    return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in ranges])


def test_what_is_new_is_appended_and_the_rest_is_found():
    pool = Pool()
    assert pool.add(ids((0, 100))) == [Part(0, 100, known=False)]
    assert pool.add(ids((0, 100))) == [Part(0, 100, known=True)]
    longer = pool.add(ids((0, 100), (500, 540)))
    assert longer == [Part(0, 100, known=True), Part(100, 40, known=False)]
    moved = pool.add(ids((900, 905), (510, 530), (33, 77)))  # neither begins where a window of the pool does
    assert moved == [Part(140, 5, known=False), Part(110, 20, known=True), Part(33, 44, known=True)]
    assert pool.ids.tolist() == ids((0, 100), (500, 540), (900, 905)).tolist()


def test_a_short_repetition_counts_as_new():
    pool = Pool()
    pool.add(ids((0, 100)))
    assert [p.known for p in pool.add(ids((8, 8 + LEAST)))] == [True]
    assert [p.known for p in pool.add(ids((8, 8 + LEAST - 1)))] == [False]


PIECES = [ids((0, 40)), ids((100, 103)), ids((20, 60)), ids((200, 217)), np.zeros(30, np.int32), ids((7, 12))]


@given(st.lists(st.lists(st.sampled_from(PIECES), min_size=1, max_size=6), min_size=1, max_size=6))
def test_the_parts_are_the_sequence(made):
    pool, earlier = Pool(), []
    for sequence in map(np.concatenate, made):
        size = len(pool.ids)
        parts = pool.add(sequence)
        assert np.concatenate([pool.ids[p.at : p.at + p.n] for p in parts]).tolist() == sequence.tolist()
        assert all((p.at + p.n <= size) == p.known for p in parts)
        assert all(p.n >= LEAST for p in parts if p.known)
        assert any(np.array_equal(sequence, known) for known in earlier) <= all(p.known or p.n < LEAST for p in parts)
        earlier.append(sequence)


@given(st.integers(0, 200), st.integers(2 * WINDOW, 60), st.integers(0, 20))
def test_every_repetition_of_that_length_is_found(start, n, before):
    pool = Pool()
    pool.add(ids((0, 300)))
    assert [p.n for p in pool.add(ids((1000, 1000 + before), (start, start + n))) if p.known] == [n]
