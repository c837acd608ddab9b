"""A pickle is read, and never executed; every array comes out as it was."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memopd.record import StoreError, import_episodes
from memopd.record.importers.pickles import Made, Name, array, first_name, read_file, read_pickle

DUMPS = Path(__file__).parent / "dumps"
TRACES = DUMPS / "verifiers/traces.jsonl"
BATCHES = [*DUMPS.glob("skyrl/**/*.pkl"), DUMPS / "verl/gen_batch.dp", DUMPS / "verl/tq_batch.pt"]

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(value=plain, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_are_what_they_were(value: Any, protocol: int) -> None:
    shared = [value, value]  # the second one comes from the memo
    read = read_pickle(pickle.dumps(shared, protocol), ())
    assert read == shared
    assert repr(read) == repr(shared)  # 1 is not True, and -0.0 is not 0.0


@settings(deadline=None)
@given(
    value=hnp.arrays(
        st.sampled_from([np.bool_, np.int64, np.int32, np.uint8, np.float32, np.float64, np.float16]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    ),
    protocol=st.integers(2, pickle.HIGHEST_PROTOCOL),
    is_transposed=st.booleans(),
)
def test_arrays_of_numpy(value: Any, protocol: int, is_transposed: bool) -> None:
    value = value.T if is_transposed else value
    read = array(read_pickle(pickle.dumps(value, protocol), ("numpy",)))
    assert read.dtype == value.dtype
    np.testing.assert_array_equal(read, value)


def test_arrays_of_text_and_of_objects() -> None:
    for value in (np.array(["a", "bcd"]), np.array([{"a": 1}, None, "x"], dtype=object)):
        assert array(read_pickle(pickle.dumps(value), ("numpy",))).tolist() == value.tolist()


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_torch(dtype: torch.dtype) -> None:
    whole = (torch.arange(24) * 0.37 - 3).to(dtype).reshape(2, 3, 4)
    for view in (whole, whole[1], whole[:, 1:, ::2], whole.transpose(0, 2), whole[:0], whole[0, 0, 0]):
        wanted = view.float() if dtype is torch.bfloat16 else view
        np.testing.assert_array_equal(array(read_file(saved(view), ("torch",))), wanted.numpy())


def test_two_tensors_of_one_storage() -> None:
    whole = torch.arange(6)
    read = read_file(saved({"a": whole[:4], "b": whole[2:]}), ("torch",))
    assert (array(read["a"]).tolist(), array(read["b"]).tolist()) == ([0, 1, 2, 3], [2, 3, 4, 5])


@pytest.mark.parametrize(
    ("offset", "size", "stride"),
    [(0, (5,), (1,)), (1, (4,), (1,)), (0, (2,), (4,)), (0, (10**9,), (0,)), (-1, (2,), (1,)), (3, (2,), (-1,))],
)
def test_a_tensor_that_goes_beyond_its_bytes(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    good = read_file(saved(torch.arange(4)), ("torch",))
    forged = Made(good.of, (good.arguments[0], offset, size, stride))
    with pytest.raises(ValueError, match="goes beyond its bytes"):
        array(forged)


# ---- nothing is executed ------------------------------------------------------------------------------------


class Attack:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def attacks(marker: Path) -> list[Attack]:
    return [
        Attack(os.system, f"touch {marker}"),
        Attack(eval, f"open({str(marker)!r}, 'w')"),
        Attack(exec, f"open({str(marker)!r}, 'w')"),
        Attack(subprocess.check_call, ["touch", str(marker)]),
        Attack(__import__, "antigravity"),
        Attack(getattr, os, "system"),
    ]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("format", ["auto", "skyrl", "verl"])
def test_an_attack_is_refused_and_does_not_run(tmp_path: Path, protocol: int, format: str) -> None:
    marker = tmp_path / "ran"
    for attack in attacks(marker)[:5]:
        file = tmp_path / "batch.pkl"
        file.write_bytes(pickle.dumps(attack, protocol))
        if protocol < 2 and format != "skyrl":
            continue  # such a file does not even look like a pickle
        with pytest.raises(StoreError, match=r"refused: it names .*; nothing of it was run$") as error:
            list(import_episodes(file, format))
        assert len(str(error.value).splitlines()) == 1
    assert not marker.exists()
    assert "antigravity" not in sys.modules
    pickle.loads(pickle.dumps(attacks(marker)[0], protocol))  # the same bytes do run where they are unpickled
    assert marker.exists()


def test_an_attack_inside_a_real_batch(tmp_path: Path) -> None:
    marker, file = tmp_path / "ran", tmp_path / "batch.pkl"
    attack = pickle.dumps(attacks(marker)[0], 4)[2:-1]  # without PROTO and STOP, followed by a POP
    for batch in BATCHES[:-1]:
        data = batch.read_bytes()
        file.write_bytes(data[:11] + attack + b"0" + data[11:])
        with pytest.raises(StoreError, match=r"refused: it names posix\.system"):
            list(import_episodes(file, "skyrl" if batch.suffix == ".pkl" else "verl"))
    with zipfile.ZipFile(BATCHES[-1]) as source, zipfile.ZipFile(tmp_path / "tq_batch.pt", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            target.writestr(name, data[:2] + attack + b"0" + data[2:] if name.endswith("data.pkl") else data)
    with pytest.raises(StoreError, match=r"refused: it names posix\.system"):
        list(import_episodes(tmp_path / "tq_batch.pt"))
    assert not marker.exists()


def test_names_of_known_packages_are_not_imported(tmp_path: Path) -> None:
    file = tmp_path / "batch.pkl"
    file.write_bytes(b"cskyrl.made_up\nRun\n(S'x'\ntR.")
    assert read_pickle(file.read_bytes(), ("skyrl",)).of == Name("skyrl.made_up", "Run")
    with pytest.raises(StoreError, match="not a batch of SkyRL"):
        list(import_episodes(file, "skyrl"))
    for batch in BATCHES:
        assert list(import_episodes(batch))
    assert not {"skyrl", "verl", "tensordict"} & sys.modules.keys()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04\x82\x01.", "refused: it uses the opcode EXT1 at byte 2"),
        (b"\x80\x05\x97.", "refused: it uses the opcode NEXT_BUFFER at byte 2"),
        (b"(iposix\nsystem\n.", "refused: it uses the opcode INST at byte 1"),
        (b"\x80\x04.", "not a pickle that can be read: not enough values"),
        (b"\x80\x04K\x01", "not a pickle that can be read"),
        (b"\x80\x04K\x01)R.", "a call is not of a named function"),
        (b"\x80\x04]K\x01b.", "a state belongs to no object"),
        (b"\x80\x04(K\x01\x85.", "not a pickle"),
        (b"\x80\x04h\x07.", "not a pickle"),
        (b"\x80\x04}]K\x01s.", "unhashable"),
        (b"\x80\x04K\x01K\x02.", "not a pickle"),
        (b"\x80\x04}.", "not a batch of SkyRL"),
        (b"", "not a pickle"),
        (b"PK\x03\x04nothing", "not a file of torch.save"),
    ],
)
def test_other_bytes_are_an_error(tmp_path: Path, data: bytes, message: str) -> None:
    file = tmp_path / "batch.pkl"
    file.write_bytes(data)
    with pytest.raises(StoreError, match=message) as error:
        list(import_episodes(file, "skyrl"))
    assert str(error.value).startswith(f"{file}: ")


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("bomb/data.pkl", b"0" * 10**7)
    with pytest.raises(StoreError, match="it is compressed"):
        list(import_episodes(tmp_path / "bomb.pt"))


@pytest.mark.parametrize("batch", [*BATCHES, TRACES], ids=lambda batch: batch.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_damage_is_a_store_error_or_other_numbers(batch: Path, data: st.DataObject) -> None:
    """A flipped byte in the ids of a row cannot be seen, so an import may succeed; it must not fail in another way."""
    good = batch.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.none() | st.integers(0, len(good)))
    file = Path(os.environ["MEMOPD_TESTS"]) / f"damaged-{os.getpid()}{batch.suffix}"
    file.write_bytes(bytes(bad[:cut]))
    for format in ("auto", {".pkl": "skyrl", ".jsonl": "verifiers"}.get(batch.suffix, "verl")):
        with suppress(StoreError):
            list(import_episodes(file, format))


def test_who_wrote_a_pickle() -> None:
    assert first_name(BATCHES[0].read_bytes()).startswith("skyrl.")
    assert first_name(pickle.dumps([1, 2])) == ""
    assert first_name(b"not a pickle") == ""
