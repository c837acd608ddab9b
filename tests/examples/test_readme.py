"""README's lines of code run as they stand."""

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def test_the_code_of_the_readme_runs(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    statements = [line for line in code.splitlines() if line.strip()]
    assert len(statements) <= 6
    monkeypatch.chdir(ROOT)
    found = {}
    exec(code, found)
    assert [len(logprob) for logprob in found["logprobs"]] == [2, 1]
    gradient = torch.autograd.grad(
        sum(p.sum() for p in found["logprobs"]), found["model"].get_input_embeddings().weight
    )
    assert gradient[0].abs().sum() > 0
