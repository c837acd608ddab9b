"""A divergence of a user's own, named on the command line: trained for two updates, or refused in one line."""

import runpy
from pathlib import Path

import numpy as np
import own_parts
import pytest
import torch
from own_parts import EXAMPLES, weights
from train.command import Ended

from memopd.train.metrics import read_metrics
from memopd.train.traces import read_traces

SETTING, OWN = "--teacher.divergence", "own_divergence:skewed"


def train(output: Path, name: str, *more: object) -> Ended:
    return own_parts.train(output, SETTING, name, *more)


def trained(name: str, *more: object) -> Path:
    return own_parts.trained(SETTING, name, *more)


def test_the_example_worked_out_by_hand():
    # p = (3/4, 1/4), p_T = (0, 1) up to e^−100: the mixture is (0.075, 0.925), and the KL is finite.
    skewed = runpy.run_path(str(EXAMPLES / "own_divergence.py"))["skewed"]
    student = torch.tensor([[0.75, 0.25]], dtype=torch.float64).log()
    teacher = torch.tensor([[-100.0, 0.0]], dtype=torch.float64)
    wanted = 0.75 * np.log(0.75 / 0.075) + 0.25 * np.log(0.25 / 0.925)
    assert skewed(student, teacher).tolist() == pytest.approx([wanted])
    assert skewed(student, student).tolist() == pytest.approx([0.0])


@pytest.mark.slow
def test_the_command_of_the_docstring_trains(tmp_path):
    own_parts.check_the_command_of_the_docstring(tmp_path, SETTING, OWN)


@pytest.mark.parametrize("state", ["aligned", "persistent"])
def test_it_is_this_divergence_that_was_trained(state):
    """The metrics, the traces and the weights are its own; what has nothing to do with the teacher is the same."""
    own, kl = (trained(name, "--teacher-state", state) for name in (OWN, "reverse_kl"))
    mine, theirs = read_metrics(own), read_metrics(kl)
    for name in ("loss_opd", "teacher_kl_think", "teacher_kl_action"):
        assert 0 < mine[0][name] < 0.95 * theirs[0][name]  # never larger: the mixture is nearer than the teacher
    for name in ("loss_ppo", "entropy", "reward", "loss_value"):
        assert mine[0][name] == theirs[0][name]
    traces = [read_traces(run / "traces" / "step-000000.parquet") for run in (own, kl)]
    assert traces[0].keys() == traces[1].keys()
    for key in traces[0]:
        a, b = (t[key].divergence for t in traces)
        assert (a <= b + 1e-6).all()
        assert (a < b).any()
    first, last, other = weights(own, 1), weights(own, 2), weights(kl, 2)
    assert max(float((last[n] - first[n]).abs().max()) for n in last) > 1e-4
    assert any(not torch.equal(last[n], other[n]) for n in last)


@pytest.mark.parametrize(
    "name", ["top_k:8", *(pytest.param(n, marks=pytest.mark.slow) for n in ("forward_kl", "jsd:0.5"))]
)
def test_the_other_built_in_ones_are_trained_by_their_names(name):
    metrics, kl = read_metrics(trained(name)), read_metrics(trained("reverse_kl"))
    assert abs(metrics[0]["loss_opd"] - kl[0]["loss_opd"]) > 1e-3
    assert metrics[0]["loss_ppo"] == kl[0]["loss_ppo"]
    assert metrics[0]["first_ratio_error"] == 0.0


@pytest.mark.slow  # tests/score/test_divergences.py has it in numbers
def test_jsd_at_one_and_a_top_k_of_everything_are_the_reverse_kl():
    """To the bit: the whole path is the same but for the name."""
    wanted = weights(trained("reverse_kl"), 2)
    for name in ("jsd:1", "top_k:100000"):
        found = weights(trained(name), 2)
        assert all(torch.equal(found[n], wanted[n]) for n in wanted)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:mine", "No module named 'no_such_module'"),
        ("own_divergence:mine", "module 'own_divergence' has no 'mine'"),
        ("own_algorithm:Reinforce", "must be a function of two arguments"),
        ("math:pi", "must be a function, got float"),
        ("jsd:2", "the number of 'jsd:2' must be between 0 and 1"),
        ("kl", "'kl' is not one of reverse_kl, forward_kl, jsd, top_k"),
    ],
)
def test_a_wrong_name_is_one_line_before_any_model_is_loaded(name, message, tmp_path):
    line = train(tmp_path / "run", name, "--model.student", tmp_path / "no-model").line()
    assert line.startswith("memopd: teacher.divergence: ")
    assert message in line
    assert not (tmp_path / "run").exists()
