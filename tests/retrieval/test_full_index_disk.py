"""An index build on a disk that fills up ends with one line and leaves nothing; with room it can be made again."""

import random

import pytest
from full_disk import disk, resize
from typer.testing import CliRunner

from memopd.cli import app
from memopd.retrieval import Passage, open_index, write_corpus


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [16, 256, 1024, 4096])
def test_an_index_build_on_a_disk_that_fills_up(kilobytes, tmp_path):
    rng = random.Random(0)
    words = [" ".join(f"w{rng.randrange(50_000)}" for _ in range(60)) for _ in range(20_000)]
    write_corpus(tmp_path / "corpus.jsonl", (Passage(str(i), f"t{i}", text) for i, text in enumerate(words)))
    with disk(tmp_path / "disk", kilobytes) as small:
        build = ["index", "build", str(tmp_path / "corpus.jsonl"), "-o", str(small / "index")]
        refused = CliRunner().invoke(app, build).exception
        assert isinstance(refused, OSError)
        print(f"{kilobytes} kB: {refused}")
        assert "No space left on device" in str(refused) or "is the disk full?" in str(refused)
        assert list(small.iterdir()) == []
        resize(small, 200_000)
        assert CliRunner().invoke(app, build).exit_code == 0
        assert len(open_index(small / "index").search(["w1"], 3)[0]) == 3
