"""What is wrong with a value is said where it enters, by call and field."""

import doctest

import numpy as np
import pytest

from memopd import types
from memopd.types import Call, Episode, Sampling, Segment, StopReason

# What is wrong -> the field and a word of the message.
BAD_CALLS = {
    "negative id": ({"prompt": [1, -2]}, "prompt: negative token id -2 at 1"),
    "negative id in an array": ({"completion": np.array([3, -1])}, "completion: negative token id -1 at 1"),
    "float id": ({"prompt": [1, 2.0]}, "prompt: token ids must be integers, got 2.0"),
    "float array": ({"completion": np.array([1.0, 2.0])}, "completion: token ids must be integers, got"),
    "bool id": ({"prompt": [True, False]}, "prompt: token ids must be integers, got True"),
    "bool among integers": ({"completion": [7, True]}, "completion: token ids must be integers, got True"),
    "numpy bool among integers": ({"prompt": [7, np.bool_(True)]}, "prompt: token ids must be integers, got"),
    "bool array": ({"prompt": np.array([True])}, "prompt: token ids must be integers, got"),
    "text": ({"prompt": ["5"]}, "prompt: token ids must be integers, got '5'"),
    "a string": ({"prompt": "56"}, "prompt: must be one flat list"),
    "None": ({"completion": None}, "completion: must be one flat list"),
    "None among integers": ({"prompt": [1, None]}, "prompt: token ids must be integers, got None"),
    "one number": ({"prompt": 5}, "prompt: must be one flat list"),
    "2-D": ({"prompt": [[1, 2], [3, 4]]}, "prompt: must be one flat list of token ids, got shape (2, 2)"),
    "2-D array": ({"completion": np.ones((1, 3), int)}, "completion: must be one flat list"),
    "ragged": ({"prompt": [[1], [2, 3]]}, "prompt: must be one flat list"),
    "empty prompt": ({"prompt": []}, "prompt: must not be empty"),
    "empty completion": ({"completion": []}, "completion: must not be empty"),
    "empty array": ({"completion": np.zeros(0, np.int32)}, "completion: must not be empty"),
    "id over 31 bits": ({"prompt": [2**31]}, f"prompt: token id {2**31} does not fit 31 bits"),
    "id over 31 bits in an array": ({"completion": np.array([1, 2**40])}, "completion: token id 1099511627776"),
    "unsigned id over 31 bits": ({"prompt": np.array([2**32 - 1], np.uint32)}, "prompt: token id 4294967295"),
    "id over 63 bits": ({"prompt": [2**63]}, "prompt: token id 9223372036854775808 does not fit"),
    "id over 64 bits": ({"prompt": [1, 2**70]}, "prompt: "),
    "too few logprobs": ({"logprobs": [-1.0]}, "logprobs: 1 given for 2 sampled tokens"),
    "too many logprobs": ({"logprobs": np.zeros(3)}, "logprobs: 3 given for 2 sampled tokens"),
    "2-D logprobs": ({"logprobs": [[-1.0, -2.0]]}, "logprobs: "),
    "NaN": ({"logprobs": [-1.0, float("nan")]}, "logprobs: not finite at 1"),
    "infinite": ({"logprobs": np.array([-np.inf, 0.0])}, "logprobs: not finite at 0"),
    "logprobs that are text": ({"logprobs": ["a", "b"]}, "logprobs: must be one flat list of numbers"),
    "None among logprobs": ({"logprobs": [-1.0, None]}, "logprobs: "),
    "segment past the prompt": ({"segments": [Segment("prefix", 0, 3)]}, "segments: "),
    "reward": ({"reward": float("inf")}, "reward: must be a finite number, got inf"),
    "unknown stop": ({"stop": "because"}, "stop: "),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_an_error_names_the_call_and_the_field(case):
    wrong, message = BAD_CALLS[case]
    with pytest.raises(ValueError, match=r"^call 3 of Alice's: ") as raised:
        Call(**{"prompt": [5, 6], "completion": [7, 8], **wrong}, name="call 3 of Alice's")
    assert str(raised.value).startswith(f"call 3 of Alice's: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calls": []}, r"episode 'e': calls: must not be empty"),
        ({"reward": float("nan")}, r"episode 'e': reward: must be a finite number"),
        ({"id": ""}, r"Episode\.id must be a non-empty string, got ''"),
        ({"id": 5}, r"Episode\.id must be a non-empty string, got 5"),
    ],
)
def test_episodes_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Episode(**{"id": "e", "task_id": "t", "calls": [Call([1], [2])], **arguments})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_sampling_is_checked(arguments, field):
    with pytest.raises(ValueError, match=rf"Sampling\.{field} must be"):
        Sampling(**arguments)


def test_segments_are_checked():
    with pytest.raises(ValueError, match=r"Segment\.kind must be prefix, memory or observation, got 'noise'"):
        Segment("noise", 0, 1)
    for start, stop in ((-1, 1), (2, 1)):
        with pytest.raises(ValueError, match="0 <= start <= stop"):
            Segment("memory", start, stop)
    whole = Call([5, 6], [7], segments=[Segment("prefix", 0, 2)])  # up to the end is not past it
    assert whole.segments == (Segment("prefix", 0, 2),)


@pytest.mark.parametrize(
    "ids",
    [
        [0, 2**31 - 1],
        (0, 2**31 - 1),
        np.array([0, 2**31 - 1]),
        np.array([0, 2**31 - 1], np.uint64),
        np.array([0, 0, 2**31 - 1], np.int32)[::2],
        [np.int64(0), np.int32(2**31 - 1)],
    ],
)
def test_integers_of_any_kind_become_int32(ids):
    call = Call(ids, ids)
    for array in (call.prompt, call.completion):
        assert array.dtype == np.int32
        assert array.tolist() == [0, 2**31 - 1]
        assert array.flags.c_contiguous


def test_arrays_are_read_only_and_the_callers_own_are_left_alone():
    prompt, logprobs = np.array([5, 6], np.int32), np.array([-1.0])
    call = Call(prompt, [7], logprobs)
    for array in (call.prompt, call.completion, call.logprobs):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    prompt[0], logprobs[0] = 99, 99.0  # still theirs to change
    assert call.prompt.tolist() == [5, 6]
    assert call.logprobs.tolist() == [-1.0]


def test_read_only_input_is_not_copied():
    prompt = np.array([5, 6], np.int32)
    prompt.flags.writeable = False
    assert Call(prompt, [7]).prompt is prompt


def test_types_are_frozen():
    for value, field in ((Call([1], [2]), "reward"), (Sampling(), "top_p"), (Segment("prefix", 0, 1), "start")):
        with pytest.raises(AttributeError):
            setattr(value, field, 0.5)
    with pytest.raises(AttributeError):
        Episode("e", "t", [Call([1], [2])]).reward = 1.0


def test_equality_is_by_value():
    a = Call([5, 6], [7], [-1.0], stop="stop", segments=[Segment("prefix", 0, 2)], name="here")
    b = Call(np.array([5, 6]), (7,), (-1,), StopReason.STOP, segments=(Segment("prefix", 0, 2),), name="there")
    assert a == b
    assert Episode("e", "t", [a]) == Episode("e", "t", (b,))
    assert a != "a call"
    with pytest.raises(TypeError, match="unhashable"):
        hash(a)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": [5, 7]},
        {"prompt": [5]},
        {"completion": [8]},
        {"logprobs": None},
        {"logprobs": [-1.5]},
        {"stop": "length"},
        {"reward": 1.0},
        {"trainable": False},
        {"purpose": "summary"},
        {"policy_version": 1},
        {"segments": [Segment("prefix", 0, 1)]},
    ],
)
def test_every_field_counts_in_equality(change):
    fields = {"prompt": [5, 6], "completion": [7], "logprobs": [-1.0]}
    assert Call(**fields) != Call(**{**fields, **change})


def test_the_examples_of_the_module():
    results = doctest.testmod(types)
    assert results.attempted >= 5
    assert results.failed == 0


def test_an_aborted_call_is_kept_but_never_trained_on():
    call = Call([1, 2], [3], stop="aborted")
    assert not call.trainable
    assert call.completion.tolist() == [3]


def test_the_path_is_what_the_model_reads():
    assert Call([1, 2], [3, 4]).path.tolist() == [1, 2, 3]
