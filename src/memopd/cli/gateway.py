"""`memopd gateway`: a recording gateway in front of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from memopd.cli.options import Adapter, Precision, check_adapter, load_model, policy_name

TOKEN = "MEMOPD_GATEWAY_TOKEN"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def gateway(
    store: Annotated[Path, typer.Option(help="The episode store (a folder) to record to.")],
    model: Annotated[str | None, typer.Option(help="The policy: a folder or a hub name.")] = None,
    adapter: Adapter = None,
    server: Annotated[
        str | None,
        typer.Option(help="URLs of vLLM servers (memopd serve policy) that sample from it, comma-separated."),
    ] = None,
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8000,
    host: Annotated[
        str, typer.Option(help=f"The address to listen on. Addresses that other machines can reach require {TOKEN}.")
    ] = "127.0.0.1",
    name: Annotated[
        str | None,
        typer.Option(help="The model name that clients use; by default the folder's name, or MODEL+ADAPTER."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="The most tokens of prompt and completion together; not with --server.")
    ] = None,
    slots: Annotated[int, typer.Option(help="The number of calls that run at once; not with --server.")] = 64,
    dtype: Annotated[
        Precision, typer.Option(help="The precision of the model; not with --server.")
    ] = Precision.float32,
) -> None:
    """Record any agent that uses OpenAI's API.

    Set the agent's base URL to http://HOST:PORT/episodes/NAME/v1 (docs/gateway.md).
    """
    if model is None and server is None:
        raise ValueError("give --model PATH, or --server URL")
    token = os.environ.get(TOKEN) or None
    if token is None and host not in _LOOPBACK:
        raise ValueError(f"set {TOKEN} to a secret, or use --host 127.0.0.1: other machines can reach {host}")
    if model is None:
        assert server is not None
        model = _served(server.split(",")[0])
    from memopd.models.load import check_model_folder, load_tokenizer

    folder = os.path.expanduser(model)
    check_model_folder(folder)
    tokenizer = load_tokenizer(folder)
    engine: Any
    if server:
        from memopd.engine.vllm import VllmEngine

        engine = VllmEngine(server.split(","), tokenizer, adapter=check_adapter(adapter, folder))
    else:
        from memopd.engine.local import LocalEngine

        engine = LocalEngine(load_model(folder, dtype, adapter), tokenizer, slots=slots, max_length=max_length)
    named = policy_name(Path(folder).name, adapter and Path(adapter).name)
    try:
        serve(engine, store, name or named, token, host, port)
    finally:
        engine.close()


def serve(engine: Any, store: Path, name: str, token: str | None, host: str, port: int) -> None:
    """Serve until the process is asked to stop."""
    import uvicorn

    from memopd.gateway.server import create_app

    app = create_app(engine, store, model=name, token=token)
    print(f"memopd: {name!r} at http://{host}:{port}/episodes/NAME/v1, recording to {store}", flush=True)
    # The gateway logs failed requests, one line each. Calls that still run 10 s after the stop are aborted.
    uvicorn.run(app, host=host, port=port, log_level="error", access_log=False, timeout_graceful_shutdown=10)


def _served(url: str) -> str:
    """The path or name of the model that a vLLM server serves, whose tokenizer the gateway loads."""
    import httpx

    try:
        return str(httpx.get(f"{url.rstrip('/')}/v1/models", timeout=30).raise_for_status().json()["data"][0]["root"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{url}: cannot find out which model it serves ({error}); is it running? or give --model"
        ) from None
