"""The picture of a pack."""

import os
import runpy
import sys

import numpy as np
import pytest
from calls import mixed_calls
from matplotlib.image import imread

from memopd.attention.draw import call_rows, draw
from memopd.compile import compile_calls, fill
from memopd.types import Call


def test_rows_of_each_call():
    packed = compile_calls([Call([7, 8], [1, 2]), Call([7, 8, 9], [3]), Call([7], [5], trainable=False)])
    assert {call: rows.tolist() for call, rows in call_rows(packed).items()} == {0: [0, 1, 2], 1: [0, 1, 3]}


def test_rows_spell_the_calls():
    calls = mixed_calls(0)
    for packed in fill(calls, 80):
        for i, rows in call_rows(packed).items():
            assert packed.tokens[rows].tolist() == [*calls[i].prompt, *calls[i].completion[:-1]]


def test_a_png(tmp_path):
    output = tmp_path / "new" / "pack.png"
    draw(compile_calls(mixed_calls(0)), output, "a title")
    data = output.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 1_000
    assert os.listdir(output.parent) == ["pack.png"]  # nothing half-written stays
    image = imread(output)[..., :3]
    grey = np.isclose(image, 0.55, atol=0.01).all(-1)
    assert grey.sum() > 1_000  # shared rows
    assert (image.max(-1) - image.min(-1) > 0.3).sum() > 1_000  # rows of one call


@pytest.mark.parametrize(("suffix", "signature"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_suffix_names_the_format(tmp_path, suffix, signature):
    output = tmp_path / f"pack{suffix}"
    draw(compile_calls([Call([7, 8], [1, 2])]), output)
    assert output.read_bytes().startswith(signature)


def test_the_module_draws_its_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "memopd.attention.draw")
    runpy.run_module("memopd.attention.draw", run_name="__main__", alter_sys=False)
    assert capsys.readouterr().out == "pack.png\n"
    assert (tmp_path / "pack.png").stat().st_size > 1_000
