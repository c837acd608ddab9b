"""Passes with prompts as a GPU captures them: what they read and compute, here with plain products on a CPU."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memopd.engine.local.attention import Pass, Span, pieces_of, plain, tile_size
from memopd.engine.local.cache import Cache
from memopd.engine.local.prompts import PromptGraphs, Shape, inputs_of, rounded
from memopd.engine.local.sequence import FlatRow
from memopd.models.attention import Layer, sampling_attention
from memopd.verify.families import VOCABULARY, tiny_model

LENGTH = 200


def row_of(running, entering, seed=0) -> FlatRow:
    """`running`: (slot, length) of sequences with one new token; `entering`: (slot, cached, new)."""
    rng, at = np.random.default_rng(seed), len(running)
    spans = [Span(slot, i, 1, length - 1) for i, (slot, length) in enumerate(running)]
    prompts = []
    for slot, cached, new in entering:
        prompts.append(Span(slot, at, new, cached))
        at += new
    everyone = [*spans, *prompts]
    positions = np.concatenate([np.arange(s.position, s.position + s.count) for s in everyone])
    places = np.concatenate([s.slot * LENGTH + np.arange(s.position, s.position + s.count) for s in everyone])
    last = np.array([s.first + s.count - 1 for s in everyone])
    return FlatRow(rng.integers(3, VOCABULARY, at), positions, places, last, spans, prompts)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 90)), min_size=1, max_size=6), st.integers(1, 16))
def test_tiles_have_every_row_once(prompts, size):
    row = row_of([(6, 30), (7, 8)], [(slot, *prompt) for slot, prompt in enumerate(prompts)])
    shape = Shape(rounded(len(row.ids)), 9, size)
    values = inputs_of(row, shape, LENGTH, unused=9 * LENGTH)
    ids, positions, places, last, first, count, start, position = np.split(values, np.cumsum(shape.sizes)[:-1])
    n = len(row.ids)
    assert np.array_equal(ids[:n], row.ids)
    assert np.array_equal(last[: len(row.last)], row.last)
    assert set(places[n:].tolist()) <= {9 * LENGTH}  # rows that fill up write to no sequence's slot
    covered = [f + i for f, c in zip(first, count, strict=True) for i in range(c)]
    assert sorted(covered) == list(range(n))
    for f, c, s, p in zip(first, count, start, position, strict=True):
        assert c <= size
        assert np.array_equal(places[f : f + c], s + positions[f : f + c])
        assert np.array_equal(positions[f : f + c], np.arange(p, p + c))


@dataclass
class PlainTiles:
    """The tiles of kernel.py with plain products, for machines without a GPU."""

    first: Any
    count: Any
    start: Any
    position: Any
    tokens: int

    def attend(self, query, keys, values, scale):
        out = torch.full((*query.shape[:2], values.shape[3]), torch.nan)  # what no tile writes is anything
        for f, c, s, p in zip(*(x.tolist() for x in (self.first, self.count, self.start, self.position)), strict=True):
            assert c <= self.tokens
            if c:
                past = (x[s // LENGTH, : p + c] for x in (keys, values))
                out[f : f + c] = plain(query[f : f + c], *past, p, Layer(scale))
        return out


@pytest.fixture
def tiles(monkeypatch):
    module = ModuleType("memopd.engine.local.kernel")
    module.Tiles = PlainTiles
    monkeypatch.setitem(sys.modules, "memopd.engine.local.kernel", module)


def captured(step):
    """As a GPU captures: the step runs once before, and then at every replay."""
    step()
    return SimpleNamespace(replay=step)


@torch.no_grad()
def eager(model, cache, row):
    spans = [*row.running, *row.entering]
    scheme = Pass(cache, torch.from_numpy(row.places), spans=spans, alone=spans)
    with sampling_attention(model):
        return model(
            input_ids=torch.from_numpy(row.ids)[None], position_ids=torch.from_numpy(row.positions)[None],
            attention_mask=None, use_cache=False, logits_to_keep=torch.from_numpy(row.last), memopd_scheme=scheme,
        ).logits[0]  # fmt: skip


@pytest.mark.usefixtures("tiles")
@torch.no_grad()
def test_captured_passes_compute_what_others_do():
    model = tiny_model("qwen2", 0).eval()
    slots, caches = 5, [Cache(5, LENGTH) for _ in range(2)]
    for cache in caches:
        eager(model, cache, row_of([], [(0, 0, 30), (1, 0, 50), (2, 0, 7)]))
    rows = [
        row_of([(0, 31), (1, 51)], [(3, 0, 60), (2, 7, 12)], seed=1),  # 74 rows, in a graph of 96
        row_of([(0, 32), (1, 52), (2, 20)], [(4, 0, 81)], seed=2),  # 84 rows, in the same graph
        row_of([(3, 61)], [(0, 0, 110)], seed=3),  # in one of 128
    ]
    graphs = PromptGraphs(model, caches[1], captured, fused=False)
    for row in rows:
        expected = eager(model, caches[0], row)
        with sampling_attention(model):
            found = graphs.run(row)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert list(graphs.graphs) == [96, 128]
    for (keys, values), (other_keys, other_values) in zip(*(c.layers.values() for c in caches), strict=True):
        torch.testing.assert_close(keys[:slots], other_keys[:slots], rtol=0, atol=1e-5)
        torch.testing.assert_close(values[:slots], other_values[:slots], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("tiles")
@torch.no_grad()
def test_a_wrong_tile_changes_the_logits(monkeypatch):
    model, cache = tiny_model("qwen2", 0).eval(), Cache(5, LENGTH)
    row = row_of([], [(0, 0, 70)])
    expected = eager(model, cache, row)

    def shifted(spans, size, length):
        pieces = pieces_of(spans, size, length)
        pieces[3] += 1  # every tile sees one key too many
        return pieces

    monkeypatch.setattr("memopd.engine.local.prompts.pieces_of", shifted)
    with sampling_attention(model):
        found = PromptGraphs(model, cache, captured, fused=False).run(row)
    assert not torch.allclose(found, expected, rtol=0, atol=1e-3)


def test_tiles_hold_all_heads_of_a_group():
    assert [tile_size(groups) for groups in (1, 7, 64, 128)] == [64, 9, 1, 1]
