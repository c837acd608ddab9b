"""The `memopd` command: one verb per stage. torch is imported inside the verbs that need it, never for --help."""

from __future__ import annotations

import json
import logging
import math
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

out = Console(width=None if sys.stdout.isatty() else 140)  # files and pipes get whole tables
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


def plain(value: Any) -> Any:
    """Values that JSON has a word for: what was not measured is null, not NaN."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(path: str, dtype: Precision) -> Any:
    """A causal LM from a folder or the hub: safetensors only, no remote code."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = os.path.expanduser(path)
    if looks_local(path) and not Path(path, "config.json").is_file():
        raise ValueError(f"{path}: there is no model here (no config.json)")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
    )
    return model.to(device()).eval()


def looks_local(path: str) -> bool:
    """A path rather than a hub name, which has at most one slash and no leading dot or slash."""
    return Path(path).exists() or path.startswith((".", "/")) or path.count("/") > 1


@app.command("import")
def import_(
    calls: Annotated[Path, typer.Argument(help="JSON lines, one call a line (docs/episodes.md).")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The episode store to write.")],
) -> None:
    """Recorded calls of any sampler or trainer into an episode store."""
    from memopd.record import import_calls, write_episodes

    count = write_episodes(output, track("episodes", import_calls(calls)))
    print(f"{output}: {count} episodes")


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
    if demo == (episodes is not None) or demo == (model is not None):
        raise ValueError("give EPISODES and --model, or --demo alone")
    from memopd.record import read_episodes

    recorded = [] if episodes is None else list(track("reading", read_episodes(episodes)))
    from memopd.verify.audit import audit as run_audit
    from memopd.verify.tables import print_audit

    if demo:
        import torch

        from memopd.verify.demo import demo as make_demo

        policy, recorded = make_demo()
        policy = policy.to(device(), getattr(torch, dtype))
        name = "tiny random Qwen2"
    else:
        assert model is not None
        policy, name = load_model(model, dtype), model
    if teacher and model:
        from memopd.score.tokenizers import check_same_tokenizer

        check_same_tokenizer(os.path.expanduser(model), os.path.expanduser(teacher))
    guide = load_model(teacher, dtype) if teacher else None
    report = run_audit(policy, recorded, attention, guide, name, track)
    if as_json:
        print(json.dumps(plain(report.as_dict())))
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
    from memopd.compile import compile_calls
    from memopd.record import read_episodes

    found = next((e for e in read_episodes(episodes) if e.id == episode), None)
    if found is None:
        raise ValueError(f"{episodes}: there is no episode {episode!r}")
    from memopd.attention.draw import draw as draw_pack

    draw_pack(compile_calls(found.calls), output, f"episode {episode}")
    print(output)


@app.command()
def models(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write Markdown there.")] = None,
    as_json: Json = False,
) -> None:
    """Which model families share rows, which run unshared, what is refused: checked now, with tiny random weights."""
    from memopd.verify.models import check_families, markdown

    rows = list(track("families", check_families()))
    if as_json:
        print(json.dumps(plain([row.as_dict() for row in rows])))
    elif output is None:
        out.print(markdown(rows), markup=False)
    else:
        from memopd.files import whole

        with whole(output) as partial:
            partial.write_text(markdown(rows))


# ---- benchmarks -------------------------------------------------------------------------------------------------

Plot = Annotated[Path | None, typer.Option(help="Also draw, to this file.")]
Repeats = Annotated[int, typer.Option(help="Timed repetitions; the median counts.")]


def numbers(text: str, separator: str = ",") -> list[int]:
    try:
        return [int(n) for n in text.split(separator)]
    except ValueError:
        raise ValueError(f"expected whole numbers separated by {separator!r}, got {text!r}") from None


def report(results: Iterable[Any], as_json: bool, plot_to: Path | None = None, **setting: Any) -> list[Any]:
    """Collect results; as JSON, print each on its own line as it comes, with what it was measured on."""
    from memopd.bench.tables import plot, tables_of
    from memopd.bench.timing import machine

    setting |= machine()
    if not as_json:
        out.print(", ".join(f"{key} {value}" for key, value in setting.items()), markup=False)
    collected = []
    for result in results:
        collected.append(result)
        if as_json:
            print(json.dumps(plain({**setting, **result.as_dict()})), flush=True)
    if not as_json:
        for made in tables_of(collected):
            out.print(made)
    if plot_to is not None:
        plot(collected, plot_to)
    return collected


@bench.command("show")
def bench_show(
    results: Annotated[Path, typer.Argument(help="What a benchmark printed with --json.")],
    plot: Plot = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables for a document.")] = False,
) -> None:
    """Recorded results as tables, and as a plot."""
    from memopd.bench.tables import load, tables_of
    from memopd.bench.tables import markdown as as_markdown
    from memopd.bench.tables import plot as draw_plot

    loaded = load(results)
    for made in tables_of(loaded):
        print(as_markdown(made) + "\n") if markdown else out.print(made)
    if plot is not None:
        draw_plot(loaded, plot)


@bench.command("compile")
def bench_compile(
    episodes: Annotated[int, typer.Option()] = 256,
    calls: Annotated[int, typer.Option(help="Calls an episode, about 1,000 tokens each.")] = 16,
    as_json: Json = False,
) -> None:
    """The compiler: tokens per second on one core, ten times the calls beside it, memory."""
    from memopd.bench.compiler import run_compile

    results = run_compile(episodes, calls)
    if as_json:
        for r in results:
            print(json.dumps(r.as_dict()))
        return
    for r in results:
        out.print(
            f"{r.calls:,} calls, {r.tokens:,} tokens -> {r.rows:,} rows: {r.seconds:.3f} s of CPU, "
            f"{r.tokens_per_second / 1e6:.1f} M tokens/s, memory {r.memory:.2f} × input"
        )
    out.print(f"ten times the calls took {results[1].seconds / results[0].seconds:.1f} times as long")


@bench.command("actor")
def bench_actor(
    model: Annotated[str, typer.Option(help="A model shape (random weights) or a folder.")] = "qwen2.5-3b",
    shapes: Annotated[str, typer.Option(help="Of q2, q8, q16, audit, append; comma-separated.")] = "q2,q8,q16",
    batches: Annotated[str, typer.Option(help="Multiples of a shape's trajectories.")] = "1,2,4",
    episodes: Annotated[Path | None, typer.Option(help="Recorded episodes instead of shapes.")] = None,
    dtype: Annotated[Precision, typer.Option()] = Precision.bfloat16,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile, in all arms.")] = True,
    repeats: Repeats = 5,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Forward and backward of an actor over the same calls: independent, merged, packed."""
    import torch

    from memopd.bench.actor import compile_layers, run_actor
    from memopd.bench.shapes import MODELS, episodes_of, random_model
    from memopd.bench.timing import matmul_peak
    from memopd.record import read_episodes

    kind = getattr(torch, dtype)
    policy = random_model(model, kind, device()) if model in MODELS else load_model(model, dtype)
    compiled = compiled and device() == "cuda"
    if compiled:
        compile_layers(policy)
    peak = matmul_peak(kind, device())
    if episodes is not None:
        work = [(episodes.name, 1, list(read_episodes(episodes)))]
    else:
        work = [(s, b, episodes_of(s, b)) for b in numbers(batches) for s in shapes.split(",")]
    runs = (run_actor(policy, e, name, batch, peak, repeats, compiled) for name, batch, e in track("actor", work))
    tflops = round(peak / 1e12, 1)
    report(runs, as_json, plot, model=model, dtype=dtype, compiled=compiled, matmul_tflops=tflops)


@bench.command("head")
def bench_head(
    decisions: Annotated[int, typer.Option()] = 8192,
    vocabulary: Annotated[int, typer.Option()] = 151_936,
    widths: Annotated[str, typer.Option(help="student:teacher, comma-separated.")] = "2048:3584,2048:2048,3584:3584",
    dtype: Annotated[Precision, typer.Option()] = Precision.bfloat16,
    repeats: Repeats = 5,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """log p, entropy and reverse KL over the full vocabulary, forward and backward."""
    import torch

    from memopd.bench.head import run_head

    pairs = [tuple(numbers(pair, ":")) for pair in widths.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--widths takes student:teacher pairs such as 2048:3584, got {widths!r}")
    kind = getattr(torch, dtype)
    arms = (run_head(decisions, vocabulary, s, t, kind, device(), repeats) for s, t in track("head", pairs))
    report(arms, as_json, plot, dtype=dtype)


@bench.command("attention")
def bench_attention(
    rows: Annotated[str, typer.Option()] = "1024,4096,16384,65536",
    depths: Annotated[str, typer.Option()] = "2,4,8",
    calls: Annotated[str, typer.Option(help="Calls in the trie, about.")] = "8,64,512",
    dtype: Annotated[Precision, typer.Option()] = Precision.bfloat16,
    repeats: Repeats = 5,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """The kernels alone, on tries of several depths and sizes."""
    import torch

    from memopd.bench.attention import sweep

    sizes = [numbers(values) for values in (rows, depths, calls)]
    kernels = track("attention", sweep(*sizes, getattr(torch, dtype), device(), repeats))
    report(kernels, as_json, plot, dtype=dtype)


@bench.command("rce")
def bench_rce(
    model: Annotated[str, typer.Option(help="A model shape, random weights.")] = "qwen2.5-3b",
    shapes: Annotated[str, typer.Option()] = "q2,q16",
    dtypes: Annotated[str, typer.Option()] = "float32,bfloat16",
    attentions: Annotated[str, typer.Option()] = "cascade,flex",
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients")] = True,
    as_json: Json = False,
) -> None:
    """Packed logits and gradients against every call alone. Exit status 1 when a check does not pass."""
    import torch

    from memopd.bench.rce import run_rce

    precisions = [Precision(d) for d in dtypes.split(",")]
    work = track("rce", [(d, s) for d in precisions for s in shapes.split(",")])
    checks = (
        r for d, s in work for r in run_rce(model, s, getattr(torch, d), attentions.split(","), device(), gradients)
    )
    results = report(checks, as_json, model=model)
    ok = all(r.logits.passed and (r.gradients is None or r.gradients.passed) for r in results)
    raise typer.Exit(0 if ok else 1)


if __name__ == "__main__":
    main()
