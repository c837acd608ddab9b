"""A run that an older version started goes on: its config.json is carried over, not rewritten."""

import json
from pathlib import Path

from command import memopd
from live import policy, world

from memopd.train.metrics import read_metrics


def as_an_older_version_wrote_it(config: Path) -> None:
    tables = json.loads(config.read_text())
    for section, added in (("optimise", "clip_high"), ("teacher", "divergence"), ("tasks", "environment")):
        del tables[section][added]
    assert tables["optimise"].pop("algorithm") == "ppo"
    tables["optimise"]["advantages"] = "gae"
    config.write_text(json.dumps(tables, indent=2) + "\n")


def test_an_older_run_is_resumed(tmp_path):
    policy()
    toml, run = tmp_path / "old.toml", tmp_path / "run"
    toml.write_text((world() / "train.toml").read_text().replace("steps = 5", 'steps = 2\nadvantages = "gae"'))
    first = memopd("train", toml, "--output", run, "--run.save_every", "1")
    assert first.code == 0, first.err
    assert "optimise.advantages is now called optimise.algorithm" in first.err
    as_an_older_version_wrote_it(run / "config.json")
    written = (run / "config.json").read_bytes()
    before = read_metrics(run)
    again = memopd("train", toml, "--output", run, "--run.save_every", "1", "--resume")
    assert again.code == 0, again.err
    assert read_metrics(run) == before
    assert len(before) == 2
    assert (run / "config.json").read_bytes() == written
    other = memopd("train", world() / "train.toml", "--output", run, "--run.save_every=1", "--resume",
                   "--optimise.steps=2", "--optimise.algorithm=grpo")  # fmt: skip
    assert "other settings: optimise.algorithm was 'ppo', is 'grpo'" in other.line()
