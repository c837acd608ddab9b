"""`memopd gateway`: a recording gateway in front of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from memopd.cli.options import Adapter, Precision, check_adapter, load_sampler, policy_name
from memopd.gateway import TOKEN


def gateway(
    store: Annotated[Path, typer.Option(help="The episode store (a folder) to record to.")],
    model: Annotated[str | None, typer.Option(help="The policy: a folder or a hub name.")] = None,
    adapter: Adapter = None,
    server: Annotated[
        str | None,
        typer.Option(help="URLs of vLLM servers (memopd serve policy) that sample from it, comma-separated."),
    ] = None,
    port: Annotated[int, typer.Option(help="The port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
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
    slots: Annotated[
        int | None, typer.Option(help="The number of calls that run at once; not with --server.", show_default="64")
    ] = None,
    dtype: Annotated[
        Precision | None, typer.Option(help="The precision of the model; not with --server.", show_default="float32")
    ] = None,
) -> None:
    """Record any agent that uses OpenAI's or Anthropic's API, with or without tools.

    Set the agent's base URL to http://HOST:PORT/episodes/NAME/v1, or to http://HOST:PORT/v1 if it sends the episode's
    name in the header x-memopd-episode (docs/gateway.md).
    """
    if model is None and server is None:
        raise ValueError("give --model PATH, or --server URL")
    if server:
        for option, given in (("--max-length", max_length), ("--slots", slots), ("--dtype", dtype)):
            if given is not None:
                raise ValueError(f"{option} is not for use with --server: set it where you start the server")
    from memopd.http import token_of

    token = token_of(TOKEN, host)
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

        sampler = load_sampler(folder, dtype or Precision.float32, adapter)
        engine = LocalEngine(sampler, tokenizer, slots=64 if slots is None else slots, max_length=max_length)
    named = policy_name(Path(folder).name, adapter and Path(adapter).name)
    try:
        serve(engine, store, name or named, token, host, port)
    finally:
        engine.close()


def serve(engine: Any, store: Path, name: str, token: str | None, host: str, port: int) -> None:
    """Serve until the process is asked to stop."""
    from memopd.gateway.server import create_app
    from memopd.http import listening, server

    with listening(host, port) as (opened, url):  # first: a gateway that has the port may have the store too
        app = create_app(engine, store, model=name, token=token, host=host)
        print(f"memopd: {name!r} at {url}/episodes/NAME/v1, recording to {store}", flush=True)
        # Calls that still run 10 s after the stop are aborted.
        server(app, timeout_graceful_shutdown=10).run(sockets=[opened])


def _served(url: str) -> str:
    """The path or name of the model that a vLLM server serves, whose tokenizer the gateway loads."""
    import httpx

    try:
        return str(httpx.get(f"{url.rstrip('/')}/v1/models", timeout=30).raise_for_status().json()["data"][0]["root"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ValueError(
            f"{url}: cannot find out which model it serves ({error}); is it running? or give --model"
        ) from None
