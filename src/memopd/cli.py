"""The `memopd` command: one verb per stage. torch is imported inside the verbs that need it, never for --help."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    help="Train agents that rewrite their own context, in the states they were really in.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure: every claim about speed has a command here.", no_args_is_help=True)
app.add_typer(bench, name="bench")

out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Attention(StrEnum):
    auto = "auto"
    dense = "dense"
    flex = "flex"
    cascade = "cascade"


def main() -> None:
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        app()
    except (ValueError, OSError) as error:  # what a user did; anything else is ours and keeps its traceback
        if os.environ.get("MEMOPD_DEBUG"):
            raise
        err.print(f"memopd: {' '.join(str(error).split())}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)


def track(description: str, items: Iterable[Any]) -> Iterable[Any]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.progress import track as bar

    return bar(items, description=f"{description:<24}", console=err, disable=not err.is_terminal, transient=True)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(path: str, dtype: Precision) -> Any:
    """A causal LM from a folder or the hub: safetensors only, no remote code."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    return model.to(device()).eval()


@app.command("import")
def import_(
    calls: Annotated[Path, typer.Argument(help="JSON lines, one call a line (docs/episodes.md).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The episode store to write.")],
) -> None:
    """Recorded calls of any sampler or trainer into an episode store."""
    from memopd.record import import_calls, write_episodes

    count = write_episodes(output, track("episodes", import_calls(calls)))
    out.print(f"{output}: {count} episodes", markup=False)


@app.command()
def audit(
    episodes: Annotated[Path | None, typer.Argument(help="An episode store.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that sampled them: a folder or a hub name.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Also measure how a teacher's targets change.")] = None,
    dtype: Annotated[Precision, typer.Option()] = Precision.float32,
    attention: Annotated[Attention, typer.Option()] = Attention.auto,
    demo: Annotated[bool, typer.Option("--demo", help="Make episodes with a tiny random model.")] = False,
    as_json: Json = False,
) -> None:
    """How wrong is flattened training on these episodes, and is packing exact? Exit status 1 when it is not."""
    if demo == (episodes is not None) or (episodes is not None and model is None):
        raise ValueError("give EPISODES and --model, or --demo")
    from memopd.record import read_episodes
    from memopd.verify.audit import audit as run_audit
    from memopd.verify.tables import print_audit

    if demo:
        import torch

        from memopd.verify.demo import demo as make_demo

        policy, recorded = make_demo()
        policy = policy.to(device(), getattr(torch, dtype))
        name = "tiny random Qwen2"
    else:
        assert episodes is not None and model is not None
        recorded = list(track("reading", read_episodes(episodes)))
        policy, name = load_model(model, dtype), model
    guide = load_model(teacher, dtype) if teacher else None
    report = run_audit(policy, recorded, attention, guide, name, track)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        print_audit(report, out)
    raise typer.Exit(0 if report.passed else 1)


@app.command()
def draw(
    episodes: Annotated[Path, typer.Argument(help="An episode store.")],
    episode: Annotated[str, typer.Option(help="The id of the episode to draw.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="An image; its suffix names the format.")],
) -> None:
    """The packed form of one episode as a picture."""
    from memopd.attention.draw import draw as draw_pack
    from memopd.compile import compile_calls
    from memopd.record import read_episodes

    found = next((e for e in read_episodes(episodes) if e.id == episode), None)
    if found is None:
        raise ValueError(f"{episodes}: there is no episode {episode!r}")
    draw_pack(compile_calls(found.calls), output, f"episode {episode}")
    out.print(str(output), markup=False)


if __name__ == "__main__":
    main()
