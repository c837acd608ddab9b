"""Traces store the numbers that an update used for the sampled tokens of a few episodes, so reports need no model.

RUN/traces/step-000012.parquet has one row for each trainable call of the step's first episodes. The calls themselves
are in RUN/episodes/, under the same name. A sampled token takes about 20 bytes before compression.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from memopd.files import whole
from memopd.types import Episode

if TYPE_CHECKING:
    from torch import Tensor

    from memopd.train.batch import MiniBatch
    from memopd.train.scoring import Guide
    from memopd.train.terms import Terms

EPISODES = 4  # per step

_FLOATS, _BOOLS = pa.list_(pa.float32()), pa.list_(pa.bool_())
SCHEMA = pa.schema(
    [
        pa.field("episode", pa.string(), False),
        pa.field("call", pa.int64(), False),
        pa.field("logp_old", _FLOATS, False),
        pa.field("advantage", _FLOATS, False),
        pa.field("value", _FLOATS),
        pa.field("divergence", _FLOATS),
        pa.field("taught", _BOOLS),
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The sampled tokens of one call. Arrays are [|a_t|]."""

    episode: str
    call: int  # among all calls of the episode
    logp_old: NDArray[np.float32]
    advantage: NDArray[np.float32]
    value: NDArray[np.float32] | None  # V_φ; None: no critic
    divergence: NDArray[np.float32] | None  # of π_θ from π_T, at the first epoch; None: no teacher
    taught: NDArray[np.bool_] | None  # m^T


def make_traces(
    episodes: Sequence[Episode],
    batches: Sequence[MiniBatch],
    terms: Sequence[Terms],
    guides: Sequence[Guide | None],
    critic: bool,
) -> list[Trace]:
    """The traces of the first episodes of the step. All ranks must call it: each has its own packs' divergences."""
    from memopd.train import ranks  # imports torch, which readers of traces do not need

    wanted, found = {e.id for e in episodes[:EPISODES]}, {}
    for batch, known, guide in zip(batches, terms, guides, strict=True):
        taught = guide is not None and bool(guide.mask.any())
        divergence = None
        if guide is not None and guide.divergence is not None and taught:
            divergence = ranks.total(guide.divergence.clone()).cpu()
        for at, episode, t in _calls(batch):
            if episode.id not in wanted:
                continue
            found[episode.id, t] = Trace(
                episode.id,
                t,
                _numbers(known.logp_old[at]),
                _numbers(known.advantage[at]),
                _numbers(known.value_old[at]) if critic else None,
                None if divergence is None else _numbers(divergence[at]),
                guide.mask[at].numpy() if guide is not None and taught else None,
            )
    return [found[e.id, t] for e in episodes[:EPISODES] for t, call in enumerate(e.calls) if call.trainable]


def _calls(batch: MiniBatch) -> Iterator[tuple[slice, Episode, int]]:
    """For every trainable call: the slice of its decisions, its episode, and its number in the episode."""
    at = 0
    for episode in batch.episodes:
        for t, call in enumerate(episode.calls):
            if call.trainable:
                yield slice(at, at + len(call.completion)), episode, t
                at += len(call.completion)


def _numbers(values: Tensor) -> NDArray[np.float32]:
    return values.float().numpy()


def write_traces(path: Path, traces: Sequence[Trace]) -> None:
    columns = {f.name: [getattr(t, f.name) for t in traces] for f in fields(Trace)}
    with whole(path) as file:
        pq.write_table(pa.table(columns, SCHEMA), file, compression="zstd", write_page_checksum=True)


def read_traces(path: Path) -> dict[tuple[str, int], Trace]:
    """The traces in a file, by episode and call."""
    try:
        rows: list[dict[str, Any]] = pq.read_table(path, schema=SCHEMA, page_checksum_verification=True).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as traces: {error}") from None
    return {(row["episode"], row["call"]): Trace(**{name: _array(name, row[name]) for name in row}) for row in rows}


def _array(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return np.asarray(value, np.bool_ if name == "taught" else np.float32)
