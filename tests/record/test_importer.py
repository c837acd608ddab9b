"""JSON lines that other programs wrote become the same episodes, or an error that names the line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from memopd.record import StoreError, import_calls, import_episodes, read_episodes, write_episodes
from memopd.record.importers.calls import CallFields
from memopd.record.store import SCHEMA
from memopd.types import Call, Episode, Sampling, Segment


def lines(path: Path, *calls: dict[str, Any] | str) -> Path:
    path.write_text("".join((c if isinstance(c, str) else json.dumps(c)) + "\n" for c in calls), encoding="utf-8")
    return path


def call(episode: str | int = "a", **rest: Any) -> dict[str, Any]:
    return {"episode": episode, "prompt": [1, 2], "completion": [3], **rest}


def error_of(path: Path) -> str:
    with pytest.raises(StoreError) as caught:
        list(import_calls(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{path}: ")


def test_a_line_with_only_the_required_fields(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", call("a"), call("a"), "", call(7))
    least = Call([1, 2], [3])
    assert list(import_calls(path)) == [Episode("a", "a", [least, least]), Episode("7", "7", [least])]


def test_every_field(tmp_path: Path) -> None:
    line = call(
        task=12,
        call=0,
        logprobs=[-1],
        stop="length",
        reward=2,
        trainable=False,
        purpose="summary",
        policy_version=3,
        segments=[
            {"kind": "prefix", "start": 0, "stop": 1},
            {"kind": "memory", "start": 1, "stop": 2, "source": 0},
        ],
        episode_reward=0.5,
        temperature=1,
        top_p=0.9,
        top_k=4,
        max_tokens=None,
        seed=5,
        started=1.5,
        ended=None,
        memory="mem1",
    )
    sampled = Call(
        [1, 2],
        [3],
        [-1.0],
        stop="length",
        reward=2.0,
        trainable=False,
        purpose="summary",
        policy_version=3,
        segments=[Segment("prefix", 0, 1), Segment("memory", 1, 2, source=0)],
    )
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=4)
    expected = Episode("a", "12", [sampled], 0.5, sampling, seed=5, started=1.5, memory="mem1")
    assert list(import_calls(lines(tmp_path / "c.jsonl", line))) == [expected]


@pytest.mark.parametrize("prompt", ["prompt", "prompt_token_ids", "prompt_ids"])
@pytest.mark.parametrize(
    "completion", ["completion", "token_ids", "completion_ids", "completion_token_ids", "response_ids"]
)
@pytest.mark.parametrize("logprobs", ["logprobs", "log_probs", "response_logprobs"])
def test_names_that_others_use(tmp_path: Path, prompt: str, completion: str, logprobs: str) -> None:
    path = lines(tmp_path / "c.jsonl", {"episode": "a", prompt: [1], completion: [2, 3], logprobs: [-0.5, -0.25]})
    assert list(import_calls(path)) == [Episode("a", "a", [Call([1], [2, 3], [-0.5, -0.25])])]


@pytest.mark.parametrize("name", ["stop", "finish_reason"])
@pytest.mark.parametrize(
    ("given", "stop"), [("stop", "stop"), ("length", "length"), ("abort", "aborted"), (None, None)]
)
def test_why_it_stopped(tmp_path: Path, name: str, given: str | None, stop: str | None) -> None:
    assert next(import_calls(lines(tmp_path / "c.jsonl", call(**{name: given})))).calls[0].stop == stop


def test_an_episodes_fields_may_be_on_any_line(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", call(seed=None), call(seed=3), call(episode_reward=1, seed=3))
    (episode,) = import_calls(path)
    assert (len(episode.calls), episode.reward, episode.seed) == (3, 1.0, 3)


def test_the_rows_of_a_store_are_such_lines(tmp_path: Path) -> None:
    given = [
        Episode(
            "é",
            "t",
            [
                Call([1, 2], [3, 4], [-0.1, -1 / 3], segments=[Segment("prefix", 0, 2)]),
                Call([5], [6], stop="stop"),
            ],
            0.1,
            Sampling(0.7, max_tokens=9),
            started=0.1,
        )
    ]
    write_episodes(tmp_path / "e.parquet", given)
    rows = pq.read_table(tmp_path / "e.parquet").to_pylist()
    assert list(import_calls(lines(tmp_path / "c.jsonl", *rows))) == given
    write_episodes(tmp_path / "again.parquet", import_calls(tmp_path / "c.jsonl"))
    assert list(read_episodes(tmp_path / "again.parquet")) == given


def test_gzip_and_byte_order_mark(tmp_path: Path) -> None:
    text = "\ufeff" + json.dumps(call()) + "\r\n"
    path = tmp_path / "c.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    assert [e.id for e in import_calls(path)] == ["a"]
    path.write_bytes(gzip.compress(text.encode())[:-4])
    assert error_of(path).startswith("line 2: cannot be read: Compressed file ended")
    path.write_text(text)
    assert error_of(path).startswith("line 1: cannot be read: Not a gzipped file")


def test_an_episode_comes_out_before_the_next_is_read(tmp_path: Path) -> None:
    path = lines(tmp_path / "c.jsonl", call("a"), call("b"), "{")
    reader = import_calls(path)
    assert next(reader).id == "a"
    with pytest.raises(StoreError, match=r"line 3: not a line of JSON"):
        next(reader)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none\.jsonl: no such file"):
        import_calls(tmp_path / "none.jsonl")


# Each is line 3, after two calls of episode 'a'.
BAD_LINES: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "not a line of JSON: Expecting property name"),
    ('{"episode": "a", "prompt": [1], "prompt": [2]}', "not a line of JSON: 'prompt' is given twice"),
    ("[1]", "must be a JSON object"),
    ({"prompt": [1], "completion": [2]}, "must be a JSON object with an episode, a string or a whole number"),
    (call(True), "must be a JSON object with an episode, a string or a whole number"),
    ({"episode": "a", "prompt": [1]}, "episode 'a': call 2: completion: missing"),
    ({"episode": "a", "completion": [1]}, "episode 'a': call 2: prompt: missing"),
    (call(prompt_ids=[1]), "episode 'a': call 2: prompt: given twice, as prompt and as prompt_ids"),
    (call(stop="stop", finish_reason="stop"), "episode 'a': call 2: stop: given twice, as stop and as finish"),
    (call(text="so"), "episode 'a': call 2: text: unknown field; known are episode, task, call, prompt"),
    (call(prompt="so"), "episode 'a': call 2: prompt: must be a list, got \"so\""),
    (call(prompt=None), "episode 'a': call 2: prompt: must be a list, got null"),
    (call(prompt=[]), "episode 'a': call 2: prompt: must not be empty"),
    (call(completion=[]), "episode 'a': call 2: completion: must not be empty"),
    (call(prompt=[1, 2.0]), "episode 'a': call 2: prompt: must be a list of whole numbers, got 2.0 at 1"),
    (call(prompt=[1, True]), "episode 'a': call 2: prompt: must be a list of whole numbers, got true at 1"),
    (call(prompt=[1, [2]]), "episode 'a': call 2: prompt: must be a list of whole numbers, got [2] at 1"),
    (call(prompt=[1, -2]), "episode 'a': call 2: prompt: negative token id -2 at 1"),
    (call(prompt=[1, 2**31]), "episode 'a': call 2: prompt: token id 2147483648 does not fit 31 bits"),
    (call(prompt=[1, 2**70]), "episode 'a': call 2: prompt: 1180591620717411303424 is too large"),
    (call(logprobs=[-1, -2]), "episode 'a': call 2: logprobs: 2 given for 1 sampled tokens"),
    (call(logprobs=[None]), "episode 'a': call 2: logprobs: must be a list of numbers, got null at 0"),
    (call(logprobs=[float("nan")]), "episode 'a': call 2: logprobs: not finite at 0"),
    (call(logprobs={"tokens": ["a"] * 99}), "episode 'a': call 2: logprobs: must be a list, got {"),
    (call(reward="1"), "episode 'a': call 2: reward: must be a number, got \"1\""),
    (call(reward=None), "episode 'a': call 2: reward: must be a number, got null"),
    (call(reward=float("inf")), "episode 'a': call 2: reward: must be a finite number, got inf"),
    (call(reward=10**400), "episode 'a': call 2: reward: 1000000000000000000000000000000000000... is too large"),
    (call(trainable=1), "episode 'a': call 2: trainable: must be true or false, got 1"),
    (call(seed=1.5), "episode 'a': call 2: seed: must be a whole number, got 1.5"),
    (
        call(stop="tired"),
        "episode 'a': call 2: stop: must be one of stop, tool_calls, function_call, length, aborted, abort, got",
    ),
    (call(segments=[3]), "episode 'a': call 2: segments[0]: must be an object, got 3"),
    (call(segments=[{"kind": "memory"}]), "episode 'a': call 2: segments[0].start: missing"),
    (
        call(segments=[{"kind": "memory", "start": 0, "stop": True}]),
        "episode 'a': call 2: segments[0].stop: must be a whole number, got true",
    ),
    (
        call(segments=[{"kind": "memory", "start": 0, "stop": 1, "end": 1}]),
        "episode 'a': call 2: segments[0].end: unknown field; known are kind, start, stop, source",
    ),
    (call(top_k=True), "episode 'a': call 2: top_k: must be a whole number, got true"),
    (call(token_ids=[1], response_ids=[2]), "episode 'a': call 2: completion: given twice, as completion and as token"),
    (
        call(segments=[{"kind": "memory", "start": 0, "stop": 9}]),
        "episode 'a': call 2: segments: Segment(kind='memory', start=0, stop=9, source=None) ends past the prompt",
    ),
    (call(episode_reward=0), "episode 'a': call 2: episode_reward: 0.0 here, 1.0 earlier in the episode"),
    (call(temperature=0.5), "episode 'a': call 2: temperature: 0.5 here, 0.7 earlier in the episode"),
    (call(call=1), "episode 'a': call 1: call 2 must come here: calls must be complete and in order"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_LINES, ids=[message for _, message in BAD_LINES])
def test_a_bad_line_is_named(tmp_path: Path, bad: dict[str, Any] | str, message: str) -> None:
    path = lines(tmp_path / "calls.jsonl", call(episode_reward=1, temperature=0.7), call(), bad)
    assert error_of(path).startswith(f"line 3: {message}")


def test_an_episode_that_comes_back(tmp_path: Path) -> None:
    path = lines(tmp_path / "calls.jsonl", call("a"), call("b"), call("a"))
    assert error_of(path).startswith("line 3: episode 'a': call 0: the episode's calls must be consecutive")


def test_sampling_is_checked(tmp_path: Path) -> None:
    path = lines(tmp_path / "calls.jsonl", call("a"), call("b", temperature=-1), call("b"))
    assert error_of(path) == "line 2: episode 'b': Sampling.temperature must be above 0 and finite, got -1.0"


def test_sampling_as_servers_say_it(tmp_path: Path) -> None:
    path = lines(tmp_path / "calls.jsonl", call("a", temperature=0, top_p=0.5), call("b", temperature=0.5, top_k=-1))
    assert [e.sampling for e in import_episodes(path)] == [Sampling(top_k=1), Sampling(temperature=0.5)]


def test_a_line_has_the_columns_of_the_store() -> None:
    assert list(CallFields.model_fields) == SCHEMA.names


def lengths(path: Path) -> list[int]:
    return [path.stat().st_size]


def nothing(path: Path) -> None:
    return None


def of_one_call(path: Path) -> list[Episode]:
    return [Episode("a", "t", [Call([1], list(path.read_bytes()))])]


def test_a_format_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x02\x03")
    assert list(import_episodes(tmp_path / "x.bin", f"{__name__}:of_one_call")) == [
        Episode("a", "t", [Call([1], [2, 3])])
    ]
    path = lines(tmp_path / "c.jsonl", call("a"))
    assert list(import_episodes(path)) == list(import_calls(path))


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("lengths", "result 0 must be an Episode, got int"),
        ("nothing", "must return episodes, got NoneType"),
    ],
)
def test_other_results_than_episodes_are_refused(tmp_path: Path, format: str, message: str) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x02")
    with pytest.raises(ValueError, match=rf"--format: '{__name__}:{format}':? {message}"):
        list(import_episodes(tmp_path / "x.bin", f"{__name__}:{format}"))


def test_an_unknown_format(tmp_path: Path) -> None:
    known = "auto, calls, verifiers, verl, skyrl; write module:name for your own"
    with pytest.raises(ValueError, match=f"--format: 'cals' is not one of {known}"):
        import_episodes(tmp_path / "x.bin", "cals")
