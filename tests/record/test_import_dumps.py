"""Files that verifiers, verl, SkyRL and TRL wrote (dumps/make_*.py) become exactly the calls that were made."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memopd.record import StoreError, import_episodes, read_episodes
from memopd.record.importers import detect
from memopd.record.importers.pickles import read_file
from memopd.types import Call, Episode, Sampling

DUMPS = Path(__file__).parent / "dumps"
TRACES = DUMPS / "verifiers/traces.jsonl"
FILES = {
    TRACES: "verifiers",
    DUMPS / "verl/gen_batch.dp": "verl",
    DUMPS / "verl/tq_batch.pt": "verl",
    DUMPS / "verl/outputs.jsonl": "verl",
    DUMPS / "skyrl/complete.pkl": "skyrl",
    DUMPS / "skyrl/dumped_data/global_step_1_training_input.pkl": "skyrl",
    DUMPS / "skyrl/dumped_data/global_step_2_training_input.pkl": "skyrl",
}


def close(episodes: list[Episode], expected: list[Episode]) -> bool:
    """Equality, but log-probabilities as float32, which is how trainers keep them."""

    def rounded(episode: Episode) -> Episode:
        calls = [
            Call(c.prompt, c.completion, None if c.logprobs is None else c.logprobs.astype(np.float32), reward=c.reward)
            for c in episode.calls
        ]
        assert {c.policy_version for c in episode.calls} <= {0, 3}
        return Episode(episode.id, episode.task_id, calls, episode.reward)

    return [rounded(e) for e in episodes] == [rounded(e) for e in expected]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_format_is_found(file: Path) -> None:
    assert detect(file) == FILES[file]
    assert list(import_episodes(file)) == list(import_episodes(file, FILES[file]))


# ---- verifiers ----------------------------------------------------------------------------------------------


def test_each_call_of_verifiers_is_what_the_engine_read_and_sampled() -> None:
    long, solver, judge = import_episodes(TRACES)
    sent = json.loads((DUMPS / "verifiers/calls.json").read_text())  # as the engine saw them, in order
    calls = [*long.calls, *solver.calls, *judge.calls]
    assert [[c.prompt.tolist(), c.completion.tolist()] for c in calls] == sent
    for call in calls:
        np.testing.assert_allclose(call.logprobs, [-1 / (3 + k) for k in range(len(call.completion))], atol=5e-5)
        assert call.stop == "stop"
    # The third and the fourth call continue from one message; the fifth reads a rewritten history.
    assert [c.trainable for c in long.calls] == [True, True, True, False, True]  # the fourth is a rejected compaction
    assert [c.trainable for c in (*solver.calls, *judge.calls)] == [True, False]
    assert (long.reward, solver.reward, judge.reward) == (1.0 * 0.5 + 0.25, 0.0, 0.0)
    assert [e.task_id for e in (long, solver, judge)] == ["g0", "task-7/solver", "task-7/judge"]


def test_a_record_of_one_trace() -> None:
    (record,) = import_episodes(DUMPS / "verifiers/records.jsonl")
    assert record.calls == next(import_episodes(TRACES)).calls
    assert record.task_id == "task-7"


def changed_trace(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The second line of traces.jsonl with a change to its first trace, after the first line as it is."""
    first, second = TRACES.read_text().splitlines()
    line = json.loads(second)
    change(line["traces"][0])
    path = tmp_path / "traces.jsonl"
    path.write_text(first + "\n" + json.dumps(line) + "\n")
    return path


def test_calls_that_were_sampled_differently_are_context(tmp_path: Path) -> None:
    def change(trace: dict[str, Any]) -> None:
        user, reply = trace["nodes"][1:]
        trace["nodes"] += [{**reply, "parent": 2}, {**user, "parent": 3}, {**reply, "parent": 4}]
        called = trace["calls"][0]
        greedy = {**called, "node": 5, "sampling": {"temperature": 0.2, "top_k": -1}}
        trace["calls"] += [{**called, "node": 3}, greedy]

    solver = list(import_episodes(changed_trace(tmp_path, change)))[1]
    assert [c.trainable for c in solver.calls] == [True, True, False]
    assert (solver.sampling.temperature, solver.sampling.top_k) == (1.0, 0)


def set_node(number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda trace: trace["nodes"][number].update(fields)


BAD_TRACES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (set_node(2, token_ids=[], mask=[]), "trace 'solver': node 2: has no token_ids; verifiers records them with its"),
    (set_node(2, parent=2), "trace 'solver': node 2: parent: must be an earlier node, got 2"),
    (set_node(2, parent=-1), "trace 'solver': node 2: parent: must be an earlier node, got -1"),
    (set_node(2, mask=[True]), "trace 'solver': node 2: mask: 1 values for 6 token_ids"),
    (set_node(2, mask=[True] * 4 + [False] * 2), "trace 'solver': node 2: mask: must mark the last ids"),
    (set_node(1, mask=[True] * 9), "trace 'solver': node 1: mask: must mark the last ids of a sampled message"),
    (set_node(2, logprobs=[-1.0]), "trace 'solver': node 2: logprobs: 1 given for 2 sampled tokens"),
    (set_node(2, token_ids=[1, 2, 3, 4, 5, -6]), "trace 'solver': node 2: completion: negative token id -6 at 1"),
    (set_node(2, token_ids="text"), 'traces[0].nodes[2].token_ids: must be a list, got "text"'),
    (lambda trace: trace.pop("id"), "traces[0].id: missing"),
    (lambda trace: trace["calls"][0].update(finish_reason="tired"), "traces[0].calls[0].finish_reason: must be one of"),
    (lambda trace: trace["calls"][0].update(sampling={"temperature": -1.0}), "Sampling.temperature must be above 0"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TRACES, ids=[message for _, message in BAD_TRACES])
def test_a_bad_trace_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    path = changed_trace(tmp_path, change)
    with pytest.raises(StoreError) as error:
        list(import_episodes(path))
    assert str(error.value).startswith(f"{path}: line 2: {message}")


def test_temperature_0_is_the_likeliest_token(tmp_path: Path) -> None:
    path = changed_trace(tmp_path, lambda trace: trace["calls"][0].update(sampling={"temperature": 0.0, "top_p": 0.9}))
    assert {e.id: e.sampling for e in import_episodes(path)}["solver"] == Sampling(top_k=1)


# ---- verl ---------------------------------------------------------------------------------------------------

FIRST = Call([11, 12, 13], [21, 2], [-1 / 8, -2 / 8])
SECOND = Call([11, 12, 13, 21, 2, 31, 32], [22, 23, 2], [-5 / 8, -6 / 8, -7 / 8])
OTHER = Call([11, 14], [24, 25, 2], [-1 / 8, -2 / 8, -3 / 8])
CUT = Call([11, 12, 13], [26, 2], [-1 / 8, -2 / 8])


def test_a_padded_batch_of_verl() -> None:
    expected = [
        Episode("p0-0", "p0", [FIRST, SECOND], 1.0),
        Episode("p1-0", "p1", [OTHER], 0.0),
        Episode("p0-1", "p0", [CUT], 0.5),
    ]
    assert close(list(import_episodes(DUMPS / "verl/gen_batch.dp")), expected)
    assert close(list(import_episodes(DUMPS / "verl/numpy.dp")), expected)  # the other way in which verl pickles


def test_the_rows_of_a_session_of_verl_are_an_episode() -> None:
    rewritten = Call([11, 12, 21, 22], [23, 2], [-1 / 8, -2 / 8])
    second = Call([11, 12, 13, 21, 2, 31, 32], [22, 2], [-5 / 8, -6 / 8])
    expected = [
        Episode("p0_0", "p0", [FIRST, second, rewritten], 0.75),
        Episode("p0_1", "p0", [CUT], 0.5),
        Episode("p1_0", "p1", [OTHER], 0.0),
    ]
    read = list(import_episodes(DUMPS / "verl/tq_batch.pt"))
    assert close(read, expected)
    assert {c.policy_version for e in read for c in e.calls} == {3}


def test_lines_of_verls_agent_loops() -> None:
    ids = ["outputs-1", "outputs-2", "outputs-3"]
    calls = [[FIRST, SECOND], [OTHER], [CUT]]
    expected = [Episode(i, i, c, r) for i, c, r in zip(ids, calls, [1.0, 0.0, 0.5], strict=True)]
    assert close(list(import_episodes(DUMPS / "verl/outputs.jsonl")), expected)


def test_a_file_of_verl_without_rewards_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.loads(line) for line in (DUMPS / "verl/outputs.jsonl").read_text().splitlines()]
    file = tmp_path / "outputs.jsonl"
    file.write_text("".join(json.dumps(line | {"reward_score": None}) + "\n" for line in lines))
    assert [e.reward for e in import_episodes(file)] == [0.0] * 3
    assert caplog.messages == [f"{file}: has no rewards; every reward is 0"]
    file.write_text(json.dumps(lines[0]) + "\n" + json.dumps(lines[1] | {"reward_score": None}) + "\n")
    caplog.clear()
    assert len(list(import_episodes(file))) == 2
    assert caplog.messages == []


# ---- SkyRL --------------------------------------------------------------------------------------------------


def test_a_complete_batch_of_skyrl() -> None:
    steps = [
        Call([11, 12, 13], [21, 22, 2], [-0.1, -0.2, -0.3], reward=0.25),
        Call([11, 12, 21, 22, 31], [23, 2], [-0.4, -0.5]),
    ]
    other = Call([11, 14], [24, 25, 26, 2], [-0.6, -0.7, -0.8, -0.9])
    expected = [Episode("complete-0", "p0", steps, 1.0), Episode("complete-2", "p1", [other], 0.5)]
    assert close(list(import_episodes(DUMPS / "skyrl/complete.pkl")), expected)


def test_a_dumped_batch_of_skyrl_has_less(caplog: pytest.LogCaptureFixture) -> None:
    file = DUMPS / "skyrl/dumped_data/global_step_2_training_input.pkl"
    read = list(import_episodes(file))
    calls = [
        [Call([11, 12, 13], [21, 2]), Call([11, 12, 13, 21, 2, 31, 32], [22, 23, 2])],
        [Call([11, 12, 13], [24, 2])],
        [Call([11, 14], [25, 26, 2]), Call([11, 14, 25, 26, 2, 33], [27, 2])],
    ]
    assert [list(e.calls) for e in read] == calls
    assert [e.task_id.removeprefix(f"{file.stem}-") for e in read] == ["prompt-0", "prompt-0", "prompt-1"]
    assert [m.split(": ", 1)[1] for m in caplog.messages] == [
        "has no rewards, because SkyRL removes them before it dumps; every reward is 0",
        "left out 1 of 4 rows, whose loss_mask is 0 everywhere",
    ]


def changed_batch(tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """complete.pkl with a change to its fields or its metadata, pickled again."""
    state = read_file((DUMPS / "skyrl/complete.pkl").read_bytes(), ("skyrl", "torch")).arguments[1]
    state["device"] = None
    state = copy.deepcopy(state)
    change(state["batch_dict"], state["metadata"])
    module = b"\x80\x04cskyrl.backends.skyrl_train.training_batch\n"
    path = tmp_path / "batch.pkl"
    path.write_bytes(
        module
        + b"_rebuild_tensor_batch\n"
        + module[2:]
        + b"TrainingInputBatch\n"
        + pickle.dumps(state)[2:-1]
        + b"\x86R."
    )
    return path


def set_value(name: str, place: tuple[int, int], value: float) -> Callable[[Any, Any], None]:
    def change(batch: dict[str, Any], metadata: dict[str, Any]) -> None:
        values = np.frombuffer(batch[name]["data"], batch[name]["dtype"]).reshape(batch[name]["shape"]).copy()
        values[place] = value
        batch[name]["data"] = values.tobytes()

    return change


def test_a_batch_that_was_pickled_again_is_the_same(tmp_path: Path) -> None:
    read = [e.calls for e in import_episodes(changed_batch(tmp_path, lambda batch, metadata: None))]
    assert read == [e.calls for e in import_episodes(DUMPS / "skyrl/complete.pkl")]


def test_the_reward_of_a_step_that_was_filtered_out_is_kept(tmp_path: Path) -> None:
    def change(batch: dict[str, Any], metadata: dict[str, Any]) -> None:
        for column in (2, 3):  # both sampled tokens of row 1, the last step of the first trajectory
            set_value("loss_mask", (1, column), 0)(batch, metadata)

    first, second = import_episodes(changed_batch(tmp_path, change))
    assert (len(first.calls), first.reward, first.calls[0].reward) == (1, 0.25 + 1.0, 0.0)
    assert second.reward == 0.5


def test_a_field_that_torch_saved(tmp_path: Path) -> None:
    """SkyRL does that with the types that NumPy does not have."""

    def change(batch: dict[str, Any], metadata: dict[str, Any]) -> None:
        path = tmp_path / "logprobs.pt"
        torch.save(torch.full((4, 4), -0.5, dtype=torch.bfloat16), path)
        batch["rollout_logprobs"] = {"format": "torch", "data": path.read_bytes()}

    first = next(import_episodes(changed_batch(tmp_path, change)))
    assert first.calls[0].logprobs.tolist() == [-0.5] * 3


# The rows of complete.pkl are [0 11 12 13 21 22 2], [11 12 21 22 31 23 2] and [0 11 14 24 25 26 2].
BAD_BATCHES: list[tuple[Callable[[Any, Any], None], str]] = [
    (lambda batch, metadata: batch.pop("loss_mask"), "loss_mask: missing; a batch needs sequences, attention_mask and"),
    (lambda batch, metadata: batch["sequences"].update(dtype="complex64"), "sequences: numbers of type 'complex64'"),
    (lambda batch, metadata: batch["sequences"].update(shape=(4, 8)), "sequences: cannot reshape array of size 28"),
    (lambda batch, metadata: batch["rewards"].update(shape=(2, 8)), "rewards: must have 4 rows, has shape (2, 8)"),
    (
        lambda batch, metadata: batch["rewards"].update(shape=(4, 2, 2)),
        "rewards: must have 4 rows, has shape (4, 2, 2)",
    ),
    (set_value("loss_mask", (1, 2), 0.5), "row 1: loss_mask: must be a row of zeros and ones"),
    (set_value("attention_mask", (1, 3), 0), "row 1: attention_mask: has padding between the ids"),
    (set_value("attention_mask", (1, 6), 0), "row 1: loss_mask: is 1 at 6, which is padding"),
    (set_value("sequences", (2, 6), -1), "row 2: turn 0: completion: negative token id -1 at 3"),
    (set_value("rollout_logprobs", (2, 3), np.nan), "row 2: turn 0: logprobs: not finite at 3"),
    (
        lambda batch, metadata: metadata.update(is_last_step=[True] * 2),
        "is_last_step: must be a list of 3 values or more",
    ),
    (
        lambda batch, metadata: metadata.update(is_last_step=[False, True, False, True]),
        "is_last_step: row 2 is the last and does not end its trajectory",
    ),
    (lambda batch, metadata: metadata.update(uids=["a", "b", "c"]), "row 1: uids: changes within a trajectory"),
    (lambda batch, metadata: metadata.update(uids="abc"), "uids: must be a list of 3 values or more"),
]


@pytest.mark.parametrize(("change", "message"), BAD_BATCHES, ids=[message for _, message in BAD_BATCHES])
def test_a_bad_batch_is_named(tmp_path: Path, change: Callable[[Any, Any], None], message: str) -> None:
    path = changed_batch(tmp_path, change)
    with pytest.raises(StoreError) as error:
        list(import_episodes(path))
    assert str(error.value).startswith(f"{path}: {message}")


# ---- text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "formats", "advice"),
    [
        ("verl/text.jsonl", ("auto", "calls", "verl"), "set skip.rollout_tq.enable=True"),
        ("trl/completions.parquet", ("auto",), "prompt_ids, completion_ids and logprobs that your rollout_func"),
    ],
)
def test_dumps_of_text_are_refused_with_advice(file: str, formats: tuple[str, ...], advice: str) -> None:
    for format in formats:
        with pytest.raises(StoreError, match=r"has text but no token ids") as error:
            list(import_episodes(DUMPS / file, format))
        assert advice in str(error.value)
        assert len(str(error.value).splitlines()) == 1


def test_text_of_anybody_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Who?"}], "reward": 1}) + "\n")
    with pytest.raises(StoreError, match='"return_token_ids": true'):
        list(import_episodes(path))


# ---- the commands -------------------------------------------------------------------------------------------


def test_an_audit_of_everything_that_was_imported(call_main: Any, tmp_path: Path) -> None:
    store, model = tmp_path / "store", tmp_path / "model"
    for file in FILES:
        status, out, err = call_main("import", file, "-o", store)
        assert (status, "episode" in out) == (0, True), err
    episodes = list(read_episodes(store))
    assert sum(len(e.calls) for e in episodes) == 7 + 4 + 5 + 4 + 3 + 3 + 5
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=49152, num_key_value_heads=1, **sizes)).save_pretrained(model)
    status, out, err = call_main("audit", store, "--model", model, "--json")
    assert status == 0, err
    assert json.loads(out)["calls"] == sum(call.trainable for e in episodes for call in e.calls) == 29


def test_a_bad_row_leaves_no_store(call_main: Any, tmp_path: Path) -> None:
    batch = changed_batch(tmp_path, set_value("sequences", (2, 6), -1))  # the episode before it is good
    status, _, err = call_main("import", batch, "-o", tmp_path / "store")
    assert status == 2
    assert err == f"memopd: {batch}: row 2: turn 0: completion: negative token id -1 at 3\n"
    assert not (tmp_path / "store").exists()
