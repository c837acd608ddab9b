"""The episodes of the page: their calls, and the numbers that the update used for every sampled token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from memopd.record import read_episodes
from memopd.report.contexts import Context, Piece, contexts
from memopd.report.pool import Pool
from memopd.report.runs import Run
from memopd.tasks import Task
from memopd.tasks.files import read_tasks
from memopd.train.traces import Trace, read_traces
from memopd.types import Call, Episode, Ids

STEPS = 12  # shown per run, including its first and its last
SHOWN = 64  # episodes per run at most
ID_BYTES = 4  # that an id of the pool takes on the page, about


def episodes_of(run: Run, budget: int) -> tuple[list[dict[str, Any]], Ids]:
    """Episodes of a few steps all over the run: as many as fit in `budget` bytes of JSON, and at least one.

    Their ids are spans of the second result, so that what episodes have in common is on the page once.
    """
    files = sorted((run.path / "episodes").glob("step-*.parquet"))
    files = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, min(STEPS, len(files))).astype(int))]
    read = {_step(file): _traced(run, file) for file in files}
    # The first episode of every step comes before any second one, and the last step before the others.
    places = [(n, step != max(read), step) for step, found in read.items() for n in range(len(found))]
    pool, kept, size = Pool(), list[dict[str, Any]](), 0
    for n, _, step in sorted(places)[:SHOWN]:
        made = _described(run, step, *read[step][n], pool)
        budget -= len(json.dumps(made, separators=(",", ":"))) + ID_BYTES * (len(pool.ids) - size)
        if budget < 0 and kept:
            break
        kept.append(made)
        size = len(pool.ids)
    return sorted(kept, key=lambda e: e["step"]), pool.ids[:size]


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def _traced(run: Run, file: Path) -> list[tuple[Episode, dict[int, Trace]]]:
    """The first episodes of a step, those with traces of the update before the others."""
    kept = run.path / "traces" / file.name
    by_episode: dict[str, dict[int, Trace]] = {}
    for (id, t), trace in (read_traces(kept) if kept.is_file() else {}).items():
        by_episode.setdefault(id, {})[t] = trace
    found = [
        (e, by_episode.get(e.id, {})) for n, e in enumerate(read_episodes(file)) if n < SHOWN or e.id in by_episode
    ]
    return sorted(found, key=lambda pair: not pair[1])[:SHOWN]


def _described(run: Run, step: int, episode: Episode, traces: dict[int, Trace], pool: Pool) -> dict[str, Any]:
    history, known = contexts(episode)
    task = _tasks(str(run.config.get("tasks", {}).get("train", ""))).get(episode.task_id)
    return {
        "step": step + 1,
        "id": episode.id,
        "task": episode.task_id,
        "questions": [] if task is None else [[q.text, list(q.answers)] for q in task.questions],
        "reward": episode.reward,
        "rule": episode.memory,
        "flat": _spans(history.ids, pool),
        "calls": [
            _call(call, begin, context, traces.get(t), pool)
            for t, (call, begin, context) in enumerate(zip(episode.calls, history.begin, known, strict=True))
        ],
    }


def _call(call: Call, begin: int, context: Context, trace: Trace | None, pool: Pool) -> dict[str, Any]:
    made = {
        "prompt": len(call.prompt),
        "begin": begin,
        "sampled": len(call.completion),
        "stop": str(call.stop) if call.stop else None,
        "reward": call.reward,
        "trainable": call.trainable,
        "purpose": call.purpose,
        "read": [_piece(p, pool) for p in context.read],
        "before": context.before,
        "dropped": [_piece(p, pool) for p in context.dropped],
        "flattened": [_piece(p, pool) for p in context.flattened],
        "same": context.same,
        "moved": context.moved,
        "logp": _short(call.logprobs if trace is None else trace.logp_old),
    }
    if trace is not None:
        made |= {"advantage": _short(trace.advantage), "value": _short(trace.value)}
        made |= {"divergence": _short(trace.divergence)}
        made |= {"taught": None if trace.taught is None else trace.taught.astype(int).tolist()}
    return made


def _piece(piece: Piece, pool: Pool) -> list[Any]:
    """[kind, source, ids, start in the history, start in the prompt], and the spans of text that is not in the history.

    A list, because a page has thousands of them and the names would be most of it.
    """
    made = [piece.kind[0], piece.source, len(piece.ids), piece.flat, piece.at]
    return made if piece.flat is not None else [*made, _spans(piece.ids, pool)]


def _spans(ids: Ids, pool: Pool) -> list[int]:
    """Starts and lengths in the pool, in turn."""
    spans: list[int] = []
    for part in pool.add(ids):
        if spans and spans[-2] + spans[-1] == part.at:
            spans[-1] += part.n
        else:
            spans += [part.at, part.n]
    return spans


def _short(values: Iterable[float] | None) -> list[float | None] | None:
    """Round to four digits, which are enough to look at."""
    return None if values is None else [float(f"{v:.4g}") if math.isfinite(v) else None for v in values]


@lru_cache(maxsize=4)
def _tasks(path: str) -> dict[str, Task]:
    """Questions and their answers, if the file of the training tasks still exists."""
    try:
        return {task.id: task for task in read_tasks(path)} if path and Path(path).exists() else {}
    except (ValueError, OSError):
        return {}


def vocabulary(run: Run, ids: Ids) -> dict[str, Any]:
    """The distinct ids of a pool, the most frequent first, their texts, and which of them are special tokens.

    There are no texts without a local tokenizer. Nothing is downloaded.
    """
    distinct, counts = np.unique(ids, return_counts=True)
    used = distinct[np.argsort(-counts, kind="stable")].tolist()
    for place in (run.path / "model", run.path / "adapter", run.config.get("model", {}).get("student", "")):
        if used and str(place):
            try:
                from memopd.models.load import load_tokenizer

                tokenizer = load_tokenizer(str(place), local=True)
            except ValueError:
                continue
            special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
            found = texts(tokenizer, used)
            return {
                "ids": used,
                "texts": [found[i] for i in used],
                "special": [n for n, i in enumerate(used) if i in special],
            }
    return {"ids": used, "texts": None, "special": []}


def indexed(ids: Ids, used: Sequence[int]) -> list[int]:
    """The pool as places in the vocabulary: small numbers for frequent ids, so that the page is smaller."""
    place = {id: n for n, id in enumerate(used)}
    return [place[id] for id in ids.tolist()]


def texts(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """The text of each id in the middle of a text; some tokenizers drop the leading space of an id alone."""

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    before = decode(anchor) if anchor else ""
    found = {}
    for i in ids:
        after = decode([*anchor, i])
        found[i] = after[len(before) :] if after.startswith(before) else decode([i])
    return found
