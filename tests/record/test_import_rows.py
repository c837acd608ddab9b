"""Any episode whose history only grows, written as a trainer's row with a mask, comes back as the same calls."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopd.record import StoreError, import_episodes
from memopd.record.importers.rows import Row, turns, unpadded
from memopd.types import Call, Episode

ids = st.lists(st.integers(0, 99), min_size=1, max_size=5)


@st.composite
def trajectories(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[float]]]:
    """What was observed, then sampled, and the log-probabilities; turn by turn."""
    return [
        (draw(ids), sampled, [draw(st.floats(-9, 0)) for _ in sampled])
        for sampled in draw(st.lists(ids, min_size=1, max_size=4))
    ]


def calls_of(trajectory: list[tuple[list[int], list[int], list[float]]]) -> list[Call]:
    history: list[int] = []
    calls = []
    for observed, sampled, logprobs in trajectory:
        history = history + observed
        calls.append(Call(history, sampled, logprobs))
        history = history + sampled
    return calls


def output_of(trajectory: list[tuple[list[int], list[int], list[float]]], last: list[int]) -> dict[str, Any]:
    """The same in verl's layout: the first prompt, and a response with everything after it."""
    (prompt, *_), *_ = trajectory
    response, mask, logprobs = [], [], []
    for turn, (observed, sampled, drawn) in enumerate(trajectory):
        before = observed if turn else []
        response += before + sampled
        mask += [0] * len(before) + [1] * len(sampled)
        logprobs += [0.0] * len(before) + drawn
    response, mask, logprobs = response + last, mask + [0] * len(last), logprobs + [0.0] * len(last)
    return {"prompt_ids": prompt, "response_ids": response, "response_mask": mask, "response_logprobs": logprobs}


@settings(max_examples=50, deadline=None)
@given(played=st.lists(trajectories(), min_size=1, max_size=3), last=st.just([]) | ids, score=st.floats(-2, 2))
def test_rows_of_verl(played: list[Any], last: list[int], score: float) -> None:
    file = Path(os.environ["MEMOPD_TESTS"]) / f"rows-{os.getpid()}.jsonl"
    lines = [{**output_of(one, last), "reward_score": score, "uid": n % 2} for n, one in enumerate(played)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = [Episode(f"{file.stem}-{n + 1}", str(n % 2), calls_of(one), score) for n, one in enumerate(played)]
    assert list(import_episodes(file)) == expected


@settings(max_examples=100, deadline=None)
@given(played=trajectories(), left=st.integers(0, 3), right=st.integers(0, 3), extra=st.integers(0, 3))
def test_padding_is_removed_on_both_sides(played: list[Any], left: int, right: int, extra: int) -> None:
    output = output_of(played, [])
    prompt, mask, logprobs = output["prompt_ids"], output["response_mask"], output["response_logprobs"]
    real = [*prompt, *output["response_ids"]]
    padded = np.array([7] * left + real + [7] * right)
    attention = np.array([0] * left + [1] * len(real) + [0] * right)
    # The columns of the response may reach into the prompt or the padding before it, where the mask is 0.
    more = min(extra, left + len(prompt))
    row = unpadded(
        "response_mask",
        padded,
        attention,
        np.array([0] * more + mask + [0] * right, dtype=np.float32),
        np.array([0.0] * more + logprobs + [0.0] * right),
        None,
    )
    assert row.ids.tolist() == real
    assert turns(row) == calls_of(played)


def test_rewards_go_to_the_call_that_earned_them() -> None:
    row = Row(
        np.arange(9), np.array([0, 1, 1, 0, 0, 1, 0, 1, 0], bool), None, np.array([1, 2, 4, 8, 0, 16, 32, 64, 128])
    )
    assert [c.reward for c in turns(row)] == [1 + 2 + 4 + 8, 16 + 32, 64 + 128]


def test_a_row_without_sampled_ids_has_no_calls() -> None:
    assert turns(Row(np.arange(3), np.zeros(3, bool), None, np.ones(3))) == []


LINE = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "response_mask": [1, 0, 1]}
BAD_LINES: list[tuple[dict[str, Any], str]] = [
    ({"response_mask": [1, 0]}, "response_mask: 2 values for 3 responses"),
    ({"response_mask": [1, 2, 0]}, "response_mask: must be a row of zeros and ones"),
    ({"response_mask": [True, False, True]}, "response_mask: must be a list of whole numbers, got true at 0"),
    ({"response_logprobs": [-1.0]}, "rollout_log_probs: 1 values for 3 responses"),
    ({"response_ids": None}, "response_ids: must be a list, got null"),
    ({"prompt_ids": []}, "turn 0: prompt: must not be empty"),
    ({"prompt_ids": "Who?"}, 'prompt_ids: must be a list, got "Who?"'),
    ({"response_logprobs": [float("nan"), 0, 0]}, "turn 0: logprobs: not finite at 0"),
    ({"reward_score": "1"}, 'reward_score: must be a number, got "1"'),
]


@pytest.mark.parametrize(("change", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_a_bad_row_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, **change}) + "\n")
    with pytest.raises(StoreError) as error:
        list(import_episodes(path))
    assert str(error.value).startswith(f"{path}: line 2: {message}")


def test_a_row_that_was_masked_whole_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, "response_mask": [0, 0, 0]}) + "\n")
    assert [e.id for e in import_episodes(path)] == ["outputs-1"]
    assert caplog.messages[0] == f"{path}: left out 1 episodes, whose response_mask is 0 everywhere"
