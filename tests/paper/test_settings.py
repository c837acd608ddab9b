from pathlib import Path

import pytest

from memopd.config import load_config
from paper.settings import Recorded, Shown, Suite, check_systems, chosen, load, without

PAPER = Path(__file__).parents[2] / "paper"
WORLD = PAPER / "world"


def test_every_shipped_file_loads():
    suite = load(Suite, WORLD / "suite.toml")
    assert list(suite.arms) == ["ppo", "persistent", "memopd"]
    assert len(suite.seeds) == 5
    load_config(WORLD / "training.toml")
    for name in ("main", "single", "control"):
        shown = load(Shown, WORLD / f"{name}.toml")
        assert shown.paper.rows
        assert all(len(row) == len(shown.paper.columns) for row in shown.paper.rows)
        assert {s for pair in shown.compare for s in pair} <= set(shown.systems)
    for name in ("state", "rules", "corruption", "domain", "packing"):
        recorded = load(Recorded, WORLD / f"{name}.toml")
        assert recorded.trajectories >= 64
        assert all(len(row) == len(recorded.paper.columns) for row in recorded.paper.rows)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arms = ['ppo']", "arms: must be an object"),
        ("speed = 1", "no such setting: speed"),
        ("seeds = ['a']", r"seeds\[0\]: must be a whole number, got \"a\""),
        ("seeds = [true]", r"seeds\[0\]: must be a whole number, got true"),
        ("concurrent = 0", "concurrent: must be 1 or more, got 0"),
        ("[evaluation]\nsamples = 0", "evaluation.samples: must be 1 or more"),
        ("[evaluation]\nlimt = 3", "no such setting: evaluation.limt"),
        ("seeds = [", "not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, says):
    (tmp_path / "suite.toml").write_text(text)
    with pytest.raises(ValueError, match=says):
        load(Suite, tmp_path / "suite.toml")


def test_systems_are_known():
    suite = load(Suite, WORLD / "suite.toml")
    check_systems(Shown("x", systems=("teacher-mem1", "ppo"), compare=(("memopd", "ppo"),)), suite, "main.toml")
    for wrong in (Shown("x", systems=("oracle-mem1",)), Shown("x", compare=(("memopd", "oracle-mem1"),))):
        with pytest.raises(ValueError, match=r"main\.toml: unknown system 'oracle-mem1': choose from ppo"):
            check_systems(wrong, suite, "main.toml")


def test_choosing():
    whole = load(Suite, WORLD / "suite.toml")
    suite = chosen(whole, ("ppo",), (3,))
    assert (list(suite.arms), suite.seeds) == (["ppo"], (3,))
    with pytest.raises(ValueError, match="unknown arm 'pop': choose from ppo"):
        chosen(whole, ("pop",), None)
    shown = Shown("x", systems=("ppo", "memopd"), compare=(("memopd", "ppo"),), claims=(("memopd", "ppo"),))
    left = without(shown, {"memopd"})
    assert (left.systems, left.compare, left.claims) == (("ppo",), (), ())
