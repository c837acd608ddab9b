"""The episodes of the page: their calls, and the numbers that the update used for every sampled token."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from memopd.record import read_episodes
from memopd.report.contexts import Context, Piece, contexts
from memopd.report.runs import Run
from memopd.tasks import Task
from memopd.tasks.files import read_tasks
from memopd.train.traces import EPISODES, Trace, read_traces
from memopd.types import Call, Episode

STEPS = 12  # shown per run, including its first and its last


def episodes_of(run: Run, budget: int) -> list[dict[str, Any]]:
    """Episodes of a few steps all over the run: as many as fit in `budget` bytes of JSON, and at least one."""
    files = sorted((run.path / "episodes").glob("step-*.parquet"))
    files = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, min(STEPS, len(files))).astype(int))]
    read = {_step(file): _traced(run, file) for file in files}
    kept: list[dict[str, Any]] = []
    for n in range(EPISODES):  # the first episode of every step before any second one, and the last step first
        for step in sorted(read, key=lambda s: (s != max(read), s)):
            if n < len(read[step]):
                made = _described(run, step, *read[step][n])
                budget -= len(json.dumps(made, separators=(",", ":")))
                if budget < 0 and kept:
                    return sorted(kept, key=lambda e: e["step"])
                kept.append(made)
    return sorted(kept, key=lambda e: e["step"])


def _step(file: Path) -> int:
    return int(file.stem.removeprefix("step-"))


def _traced(run: Run, file: Path) -> list[tuple[Episode, dict[int, Trace]]]:
    """The episodes that have traces of the update; for runs without traces, the first few."""
    kept = run.path / "traces" / file.name
    if not kept.is_file():
        return [(episode, {}) for episode in islice(read_episodes(file), EPISODES)]
    by_episode: dict[str, dict[int, Trace]] = {}
    for (id, t), trace in read_traces(kept).items():
        by_episode.setdefault(id, {})[t] = trace
    return [(e, by_episode[e.id]) for e in read_episodes(file) if e.id in by_episode]


def _described(run: Run, step: int, episode: Episode, traces: dict[int, Trace]) -> dict[str, Any]:
    history, known = contexts(episode)
    task = _tasks(str(run.config.get("tasks", {}).get("train", ""))).get(episode.task_id)
    return {
        "step": step + 1,
        "id": episode.id,
        "task": episode.task_id,
        "questions": [] if task is None else [[q.text, list(q.answers)] for q in task.questions],
        "reward": episode.reward,
        "rule": episode.memory,
        "flat": history.ids.tolist(),
        "calls": [
            _call(call, begin, context, traces.get(t))
            for t, (call, begin, context) in enumerate(zip(episode.calls, history.begin, known, strict=True))
        ],
    }


def _call(call: Call, begin: int, context: Context, trace: Trace | None) -> dict[str, Any]:
    made = {
        "prompt": len(call.prompt),
        "begin": begin,
        "sampled": len(call.completion),
        "stop": str(call.stop) if call.stop else None,
        "reward": call.reward,
        "trainable": call.trainable,
        "purpose": call.purpose,
        "read": [_piece(p) for p in context.read],
        "dropped": [_piece(p) for p in context.dropped],
        "flattened": [_piece(p) for p in context.flattened],
        "same": context.same,
        "moved": context.moved,
        "logp": _short(call.logprobs if trace is None else trace.logp_old),
    }
    if trace is not None:
        made |= {"advantage": _short(trace.advantage), "value": _short(trace.value)}
        made |= {"divergence": _short(trace.divergence)}
        made |= {"taught": None if trace.taught is None else trace.taught.astype(int).tolist()}
    return made


def _piece(piece: Piece) -> dict[str, Any]:
    """Describe a piece as a span of `flat`, or by its ids."""
    made: dict[str, Any] = {"kind": piece.kind, "source": piece.source, "flat": piece.flat, "at": piece.at}
    return made | ({"n": len(piece.ids)} if piece.flat is not None else {"ids": piece.ids.tolist()})


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


def vocabulary(run: Run, episodes: Sequence[dict[str, Any]]) -> dict[int, str] | None:
    """The text of every id that the episodes use, or None without a local tokenizer. Nothing is downloaded."""
    used = {i for e in episodes for i in e["flat"]}
    used |= {i for e in episodes for c in e["calls"] for p in (*c["read"], *c["dropped"]) for i in p.get("ids", ())}
    for place in (run.path / "model", run.path / "adapter", run.config.get("model", {}).get("student", "")):
        if used and str(place):
            try:
                from memopd.models.load import load_tokenizer

                tokenizer = load_tokenizer(str(place), local=True)
            except ValueError:
                continue
            return texts(tokenizer, sorted(used))
    return None


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
