"""Checks whether we can record from a server, before its first request and whenever it is back after a failure."""

from __future__ import annotations

import logging
from typing import Any

from memopd.engine.protocol import Request
from memopd.engine.vllm.servers import Fleet, Lost, Server
from memopd.engine.vllm.wire import GENERATE, Received, body
from memopd.types import Sampling

log = logging.getLogger(__name__)

_TEXT = "Tokens in, tokens out: <search>12 rivers; São Tomé?</search>\n"
_TOKENS = 8
_SECONDS = 60  # in which any healthy server gives one small answer, however busy it is


async def probe(fleet: Fleet, server: Server, tokenizer: Any) -> None:
    """Sets `server.label` and `server.max_length`.

    A `ValueError` names the server and what to change; `Lost` means that it does not answer.
    """
    await fleet.call(server, "GET", "/health", timeout=10)
    version = await _version(fleet, server)
    if not await fleet.has(server, GENERATE):
        raise _wrong(server, f"vLLM {version} serves no {GENERATE}", "--enable-scale-out")
    await _check_tokenizer(fleet, server, tokenizer)
    await _check_logprobs(fleet, server, tokenizer)
    server.label = await read_label(fleet, server)
    server.max_length = await _max_length(fleet, server)
    log.info("%s: vLLM %s, weights %r", server.url, version, server.label)


async def _version(fleet: Fleet, server: Server) -> str:
    try:
        return str((await fleet.call(server, "GET", "/version", timeout=10))["version"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{server.url} is not a vLLM server (no /version); start one: memopd serve policy") from error


async def _check_tokenizer(fleet: Fleet, server: Server, tokenizer: Any) -> None:
    """The server finds stop strings with its own tokenizer. If that differs from ours, it serves another model."""
    if not await fleet.has(server, "/tokenize"):
        return
    question = {"prompt": _TEXT, "add_special_tokens": False}
    theirs = (await fleet.call(server, "POST", "/tokenize", json=question, timeout=_SECONDS))["tokens"]
    if theirs != tokenizer.encode(_TEXT, add_special_tokens=False):
        served = (await fleet.call(server, "GET", "/v1/models", timeout=10))["data"][0]["root"]
        raise ValueError(f"{server.url} serves {served}, whose tokenizer is not ours: is it the right model?")


async def _check_logprobs(fleet: Fleet, server: Server, tokenizer: Any) -> None:
    """Log-probabilities must be those of the sampling distribution, after temperature and top-k.

    With top-k 1 that distribution is one token, so they are 0. Log-probabilities from before the cut, and logits, are
    not. (The check asks this of most tokens, because a tie in half precision leaves two.)
    """
    prompt = tokenizer.encode(_TEXT, add_special_tokens=False)
    payload = body(Request(prompt, seed=0, sampling=Sampling(top_k=1, max_tokens=_TOKENS)), stream=False)
    payload["sampling_params"]["ignore_eos"] = True
    received = Received()
    async for choice in fleet.choices(server, payload, timeout=min(_SECONDS, fleet.timeout)):
        received.take(choice)
    if sum(abs(value) < 1e-6 for value in received.logprobs) <= _TOKENS / 2:
        what = "returns log-probabilities of another distribution than it samples from"
        raise _wrong(server, what, "--logprobs-mode processed_logprobs")


async def read_label(fleet: Fleet, server: Server) -> str | None:
    """The label of its weights. Only servers in development mode report it, and only those can be updated."""
    if not await fleet.has(server, "/weight_info"):
        return None
    return str((await fleet.call(server, "GET", "/weight_info", timeout=_SECONDS))["weight_version"])


async def _max_length(fleet: Fleet, server: Server) -> int | None:
    if not await fleet.has(server, "/v1/models"):
        return None
    served = (await fleet.call(server, "GET", "/v1/models", timeout=10))["data"][0]
    return int(served["max_model_len"]) if served.get("max_model_len") else None


async def probe_at_start(fleet: Fleet, server: Server, tokenizer: Any) -> None:
    """The first probe, where a missing answer means a wrong address rather than a server to wait for."""
    try:
        await probe(fleet, server, tokenizer)
    except Lost as error:
        port = server.url.rpartition(":")[2]
        start = f"start one: memopd serve policy MODEL --port {port}"
        raise ConnectionError(f"{server.url}: no policy server answers ({error}); {start}") from error


def _wrong(server: Server, what: str, flag: str) -> ValueError:
    return ValueError(f"{server.url} {what}: start it with {flag} (memopd serve policy does)")
