"""The arm that uses a vLLM server with the same weights, started as `memopd serve policy` starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from memopd.engine import Request
from memopd.engine.vllm.start import command, find_vllm
from memopd.types import Sampling

START_SECONDS = 600.0  # a first start compiles


@contextmanager
def served(model: Any, work: Any, python: Path) -> Iterator[dict[str, Callable[[], None]]]:
    """Yield the arm by its name. The server runs until the block ends."""
    import httpx

    from memopd.engine.vllm import VllmEngine

    with TemporaryDirectory(prefix="memopd-") as folder:
        tokenizer = _save(model, Path(folder))
        with _server(folder, python, work.longest, str(model.dtype).removeprefix("torch.")) as url:
            version = httpx.get(f"{url}/version", timeout=60).json()["version"]
            engine = VllmEngine([url], tokenizer)

            def run() -> None:
                # As after an update: the keys and values of the last round are invalid.
                httpx.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
                made = engine.generate(
                    [
                        Request(prompt, seed=i, sampling=Sampling(max_tokens=count))
                        for i, (prompt, count) in enumerate(zip(work.prompts, work.tokens, strict=True))
                    ]
                )
                assert [len(c.tokens) for c in made] == work.tokens

            try:
                yield {f"vLLM {version}, over HTTP": run}
            finally:
                engine.close()


def _save(model: Any, folder: Path) -> Any:
    """Save a checkpoint. The server needs a tokenizer; any will do, and without an end token no sample ends early."""
    import transformers

    from memopd.world.tokenizer import SMALLEST, train_tokenizer

    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer = train_tokenizer(["the the the"], SMALLEST + 1)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return tokenizer


@contextmanager
def _server(model: str, python: Path, longest: int, dtype: str) -> Iterator[str]:
    import httpx

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    longest = max(longest, 512)  # the engine's checks of a new server need some room too
    line, environment = command(find_vllm(python), model, "127.0.0.1", port, dtype, ["--max-model-len", str(longest)])
    log = Path(model, "server.log")
    with log.open("w") as lines:
        server = subprocess.Popen(
            line,
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", **environment},
            stdout=lines,
            stderr=lines,
            start_new_session=True,
        )
    url, limit = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while True:
            if server.poll() is not None or time.monotonic() > limit:
                last = [text for text in log.read_text().splitlines() if text.strip()][-1:]
                raise RuntimeError(f"vLLM did not start: {' '.join(last)}")
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield url
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)  # its workers too
            server.wait()
