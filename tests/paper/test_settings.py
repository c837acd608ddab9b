from pathlib import Path

import pytest

from memopd.config import load_config
from paper.settings import ARMS, Recorded, Shown, Suite, chosen, load

CONFIGS = Path(__file__).parents[2] / "paper" / "configs"


def test_every_shipped_file_loads():
    suite = load(Suite, CONFIGS / "suite.toml")
    assert set(suite.arms) == set(ARMS)
    assert len(suite.seeds) == 5
    load_config(CONFIGS / "training.toml")
    for name in ("main", "single", "control"):
        shown = load(Shown, CONFIGS / f"{name}.toml")
        assert shown.paper.rows
        assert all(len(row) == len(shown.paper.columns) for row in shown.paper.rows)
        assert {s for pair in shown.compare for s in pair} <= set(shown.systems)
    for name in ("state", "rules", "corruption", "domain", "packing"):
        recorded = load(Recorded, CONFIGS / f"{name}.toml")
        assert recorded.trajectories >= 64
        assert all(len(row) == len(recorded.paper.columns) for row in recorded.paper.rows)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("arms = ['grpo']", "unknown arm 'grpo'"),
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


def test_systems_are_known(tmp_path):
    (tmp_path / "main.toml").write_text("title = 'x'\nsystems = ['oracle-mem1']")
    with pytest.raises(ValueError, match="unknown system 'oracle-mem1'"):
        load(Shown, tmp_path / "main.toml")


def test_choosing():
    suite = chosen(Suite(), ("ppo",), (3,))
    assert (suite.arms, suite.seeds) == (("ppo",), (3,))
    with pytest.raises(ValueError, match="unknown arm"):
        chosen(Suite(), ("pop",), None)
