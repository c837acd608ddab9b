"""An algorithm of a user's own, named on the command line: trained for two updates, or refused in one line."""

from pathlib import Path

import own_parts
import pytest
import torch
from own_parts import weights
from train.command import Ended

from memopd.train.metrics import read_metrics

SETTING, OWN = "--optimise.algorithm", "own_algorithm:Reinforce"


def train(output: Path, name: str, *more: object) -> Ended:
    return own_parts.train(output, SETTING, name, *more)


def trained(name: str, *more: object) -> Path:
    return own_parts.trained(SETTING, name, *more)


def moved(run: Path) -> dict[str, torch.Tensor]:
    first, last = (weights(run, n) for n in (1, 2))
    return {name: last[name] - first[name] for name in last}


@pytest.mark.slow
def test_the_command_of_the_docstring_trains(tmp_path):
    own_parts.check_the_command_of_the_docstring(tmp_path, SETTING, OWN)


def test_it_is_this_algorithm_that_was_trained():
    """No critic; its loss is −mean ℓA, which is not zero where a mean of −ϱA would be; the weights moved, elsewhere."""
    own, ppo = trained(OWN), trained("ppo")
    assert not list((own / "checkpoints" / "step-000002").glob("critic*"))
    assert list((ppo / "checkpoints" / "step-000002").glob("critic*"))
    for mine, theirs in zip(read_metrics(own), read_metrics(ppo), strict=True):
        assert "loss_value" in theirs
        assert "loss_value" not in mine
        assert abs(mine["loss_ppo"] - theirs["loss_ppo"]) > 1e-3
        assert mine["clip_fraction"] == 0.0
    mine, theirs = moved(own), moved(ppo)
    assert max(float(d.abs().max()) for d in mine.values()) > 1e-4
    assert any(not torch.equal(mine[n], theirs[n]) for n in mine)


@pytest.mark.parametrize(("setting", "value"), [("budget", 16384), ("micro_batch", 1), ("share", "false")])
def test_packing_does_not_change_it(setting, value, tmp_path):
    """What holds for built-in algorithms holds for a user's: up to rounding the same numbers in other packs."""
    assert train(tmp_path / "run", OWN, f"--optimise.{setting}", value).code == 0
    for a, b in zip(read_metrics(tmp_path / "run"), read_metrics(trained(OWN)), strict=True):
        for name in ("loss_ppo", "grad_norm", "loss_opd", "advantage_std"):
            assert a[name] == pytest.approx(b[name], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        ("own_algorithm:Mine", "module 'own_algorithm' has no 'Mine'"),
        ("own_algorithm:Credit", "must be a class with needs_critic, credit, loss; it has no"),
        ("own_divergence:skewed", "must be a class with needs_critic, credit, loss; it has no"),
        ("reinforce", "'reinforce' is not one of ppo, grpo, rloo, gspo"),
    ],
)
def test_a_wrong_name_is_one_line_before_any_model_is_loaded(name, message, tmp_path):
    line = train(tmp_path / "run", name, "--model.student", tmp_path / "no-model").line()
    assert line.startswith("memopd: optimise.algorithm: ")
    assert message in line
    assert not (tmp_path / "run").exists()


def test_the_right_name_comes_as_far_as_the_model(tmp_path):
    """So that the lines above are of the name, and not of a command that ends early anyway."""
    line = train(tmp_path / "run", OWN, "--model.student", tmp_path / "no-model").line()
    assert "no-model" in line
    assert "optimise.algorithm" not in line
