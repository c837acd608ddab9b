"""The script that made the shipped student."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]


def smaller(script: str) -> str:
    """Fewer passages, episodes and tokens, and nothing else changed."""
    less = {
        r"--episodes 24000": "--episodes 40 --passages 2000",
        r"\b\d+0000000 ": "60000 ",
        r" --limit \d+": "",
        r"--batch 256": "--batch 64 --limit 30",
        r"--sft.tokenizer": "--sft.batch 20000 --model.dtype float32 --sft.tokenizer",
    }
    for pattern, instead in less.items():
        script, count = re.subn(pattern, instead, script)
        assert count, pattern
    return script


def test_the_script_can_be_made_smaller():
    assert smaller((ROOT / "paper" / "student.sh").read_text()).count(" 60000 ") == 5


@pytest.mark.slow
def test_the_student_is_made_again(tmp_path):
    """All five parts, in small."""
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "student.sh").write_text(smaller((ROOT / "paper" / "student.sh").read_text()))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(["sh", "paper/student.sh", "out"], cwd=tmp_path, env=environment, check=True)
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "student-5" / "model")
    shipped = AutoModelForCausalLM.from_pretrained(ROOT / "models" / "student")
    assert {n: p.shape for n, p in made.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
