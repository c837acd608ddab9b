"""A training on a disk that fills up ends with one line, and ends bit for bit as if nothing had been after --resume."""

import pytest
import torch
from command import memopd
from full_disk import disk, resize
from saved import read_whole
from tiny import workshop

from memopd.train.checkpoint import latest, read_state


def used(folder) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
def test_training_on_a_disk_that_fills_up(share, tmp_path):
    undisturbed = workshop() / "runs" / "on-a-large-disk"
    arguments = ("train", workshop() / "config.toml", "--output")
    if not undisturbed.exists():
        assert memopd(*arguments, undisturbed).code == 0
    size = used(undisturbed) // 1024
    with disk(tmp_path / "disk", max(16, int(share * size))) as small:
        run = small / "run"
        line = memopd(*arguments, run).line()
        print(f"{share:.0%} of {size} kB: {line}")
        assert "No space left on device" in line
        saved = latest(run)
        print("saved:", None if saved is None else read_state(saved)["step"])
        resize(small, 4 * size)
        ended = memopd(*arguments, run, "--resume")
        assert ended.code == 0, ended.err
        a, b = (read_whole(r / "checkpoints" / "step-000003", "student") for r in (run, undisturbed))
        assert all(torch.equal(a[name], b[name]) for name in b)
        kept = [
            sorted(str(f.relative_to(r)) for f in r.rglob("*") if "events" not in f.name) for r in (run, undisturbed)
        ]
        assert kept[0] == kept[1]  # and nothing half written
