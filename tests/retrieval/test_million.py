"""A million passages on a machine of 24 GiB."""

import pytest

from benchmarks.growth import run_growth


def test_growth_is_measured(tmp_path):
    small, large = run_growth([500, 2000], queries=20, scratch=tmp_path)
    assert (small.passages, large.passages) == (500, 2000)
    assert 3 * small.corpus_bytes < large.corpus_bytes < 5 * small.corpus_bytes
    assert 0 < small.index_bytes < large.index_bytes
    assert min(small.p50, small.build_seconds, small.build_memory) > 0
    assert small.p50 <= small.p99
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_million_passages(tmp_path):
    (result,) = run_growth([1_000_000], scratch=tmp_path)
    assert max(result.build_memory, result.search_memory) < 24 * 2**30
