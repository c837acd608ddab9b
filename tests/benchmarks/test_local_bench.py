"""The engine's benchmark runs, and counts only what every arm was asked to sample."""

import math
from pathlib import Path

import torch

from benchmarks.engine import run_engine, work_of


def test_every_arm_samples_the_same_work():
    work = work_of(prompts=4, shortest=5, longest=40, most=12)
    result = run_engine("3m", torch.float32, "cpu", repeats=1, vllm=Path("/nowhere"), work=work)
    assert result.sampled_tokens == sum(work.tokens)
    assert (result.shortest, result.longest) == (min(map(len, work.prompts)), max(map(len, work.prompts)))
    arms = {a.name: a for a in result.arms}
    ran = [a for a in result.arms if not a.note]
    assert {"transformers generate, batch 4", "memopd, 4 slots", "memopd, 1 slots"} <= {a.name for a in ran}
    assert all(a.tokens_per_second > 0 for a in ran)
    assert max(a.speedup for a in ran if "generate" in a.name) == 1
    assert "transformers continuous batching" in arms  # measured, or why not
    assert arms["vLLM"].note == "ValueError: /nowhere: not an interpreter (No such file or directory)"
    assert all(math.isnan(a.seconds) for a in result.arms if a.note)


def test_batches_are_by_prompt_length():
    work = work_of(prompts=10)
    parts = work.batches(4)
    sizes = [len(p) for part in parts for p in part.prompts]
    assert sizes == sorted(map(len, work.prompts))
    assert [len(part.prompts) for part in parts] == [4, 4, 2]
