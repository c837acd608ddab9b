"""`memopd index` and `memopd serve retrieval`: build, describe and serve an index of passages."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.options import Json, out, track

index = typer.Typer(help="Build an index of a corpus, or describe one.", no_args_is_help=True)
serve = typer.Typer(help="Serve an index or a policy over HTTP.", no_args_is_help=True)


class Kind(StrEnum):
    lexical = "lexical"
    dense = "dense"
    hybrid = "hybrid"


Model = Annotated[str | None, typer.Option(help="The embedding model of a dense or hybrid index.")]


@index.command()
def build(
    corpus: Annotated[Path, typer.Argument(help="JSON lines with id and contents: .jsonl or .jsonl.gz.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The index folder to write.")],
    kind: Annotated[
        Kind, typer.Option(help="BM25 (lexical), embeddings (dense), or both, fused by rank (hybrid).")
    ] = Kind.lexical,
    model: Model = None,
    query_prefix: Annotated[
        str | None, typer.Option(help="What the model reads before a query, if it does not say so itself.")
    ] = None,
    passage_prefix: Annotated[
        str | None, typer.Option(help="What the model reads before a passage, if it does not say so itself.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Skip malformed rows and count them.")] = False,
) -> None:
    """Build an index on disk from a corpus in the format of wiki-18."""
    from memopd.retrieval import build_index

    if kind is not Kind.lexical:
        _quiet()
    info = build_index(corpus, output, kind, model, skip_bad, track, (query_prefix, passage_prefix))
    skipped = f", {info.skipped:,} malformed rows skipped" if info.skipped else ""
    print(f"{output}: {info.passages:,} passages{skipped}")


@index.command()
def info(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="An index folder.")],
    as_json: Json = False,
) -> None:
    """Print what an index contains and how it was built."""
    from memopd.retrieval import read_info

    known = read_info(folder).as_dict()
    known["bytes"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if as_json:
        print(json.dumps(known))
        return
    for name, value in known.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        if isinstance(value, dict):
            shown = ", ".join(f"{key} {item}" for key, item in value.items())
        out.print(f"{name:<14} {shown}", markup=False, highlight=False, soft_wrap=True)


@serve.command()
def retrieval(
    folder: Annotated[Path, typer.Argument(metavar="INDEX", help="An index folder.")],
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. One that other machines can reach requires MEMOPD_RETRIEVAL_TOKEN."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 picks a free one.", min=0, max=65535)] = 8000,
    topk: Annotated[int, typer.Option(help="Passages per query if a request does not say how many.")] = 3,
    max_topk: Annotated[int, typer.Option(help="The most passages per query that a request may ask for.")] = 100,
    max_queries: Annotated[int, typer.Option(help="The most queries per request.")] = 512,
    max_length: Annotated[int, typer.Option(help="The most characters per query.")] = 4096,
    model: Model = None,
) -> None:
    """Serve an index with Search-R1's protocol: POST /retrieve, GET /health."""
    from memopd.http import listening, server, token_of
    from memopd.retrieval import open_index, read_info
    from memopd.retrieval.client import TOKEN
    from memopd.retrieval.server import Limits, create_app

    token = token_of(TOKEN, host)
    known = read_info(folder)
    if known.kind != Kind.lexical:
        _quiet()
    limits = Limits(max_queries, max_length, max_topk)
    app = create_app(open_index(folder, model), limits, topk, token=token, host=host)
    with listening(host, port) as (opened, url):
        print(f"{url}/retrieve: {known.passages:,} passages, {known.kind}", flush=True)
        server(app).run(sockets=[opened])


def _quiet() -> None:
    """Turn off the progress bars and messages of other libraries, which would overwrite ours."""
    import logging

    import transformers

    for name in ("faiss", "sentence_transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
