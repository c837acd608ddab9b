"""`memopd serve policy`: a vLLM server that samples from a policy."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ServedPrecision(StrEnum):
    auto = "auto"  # as in the checkpoint
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def policy(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model: a folder or a hub name.")],
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. Anyone who can reach it can replace the weights: keep it off open networks."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on.", min=1, max=65535)] = 8001,
    dtype: Annotated[ServedPrecision, typer.Option(help="The precision of the model.")] = ServedPrecision.auto,
    lora_rank: Annotated[
        int, typer.Option(help="Serve adapters up to this rank, which a client or a training gives it; 0: none.", min=0)
    ] = 0,
    python: Annotated[
        Path | None, typer.Option(help="A Python interpreter that has vLLM, if this one does not.")
    ] = None,
) -> None:
    """Serve a model with vLLM for sampling and training. Arguments after -- are passed to vLLM unchanged."""
    from memopd.engine.vllm.start import command, exec_server, find_vllm
    from memopd.http import listening
    from memopd.models.load import check_model_folder

    model = os.path.expanduser(model)
    check_model_folder(model)
    line, environment = command(find_vllm(python), model, host, port, dtype, context.args, lora_rank)
    with listening(host, port):
        pass  # closed again for vLLM, which notices a port in use late and with a traceback
    exec_server(line, environment)


def register(serve: typer.Typer) -> None:
    """Add `policy` to the subcommands of `serve`."""
    serve.command("policy", context_settings={"allow_extra_args": True})(policy)
