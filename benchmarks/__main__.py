"""`python -m benchmarks ...`: one command for every claim about speed.

Options are checked before torch is imported, so that a mistake is reported at once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from memopd.cli.options import Json, Precision, device, load_model, numbers, out, plain, run, track

app = typer.Typer(
    help="Measure speed and memory: there is one command for every claim about speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

STEP_ARMS = ("packed-full", "unshared-full", "packed-lora", "unshared-lora")
ATTENTIONS = ("auto", "dense", "flex", "cascade")
Plot = Annotated[Path | None, typer.Option(help="An image file to draw the results to.")]
Repeats = Annotated[int, typer.Option(help="Timed repetitions, of which the median is reported.")]


def chosen(text: str, what: str, known: Iterable[str]) -> list[str]:
    """Check the names in a comma-separated list."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: choose from {', '.join(known)}")
    return names


def report(results: Iterable[Any], as_json: bool, plot_to: Path | None = None, **setting: Any) -> list[Any]:
    """Collect results. As JSON, print each at once on its own line, with the setting it was measured in."""
    from benchmarks.tables import plot, tables_of
    from benchmarks.timing import machine
    from memopd.evaluate.provenance import source

    setting |= machine() | source()
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


@app.command("show")
def bench_show(
    results: Annotated[Path, typer.Argument(help="A file with the output of a benchmark with --json.")],
    plot: Plot = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")] = False,
) -> None:
    """Show recorded results as tables, and as a plot."""
    from memopd.files import json_lines

    next(json_lines(results), None)  # a file without results is an error, before torch is imported

    from benchmarks.output import markdown as as_markdown
    from benchmarks.tables import load, tables_of
    from benchmarks.tables import plot as draw_plot

    loaded = load(results)
    for made in tables_of(loaded):
        print(as_markdown(made) + "\n") if markdown else out.print(made)
    if plot is not None:
        draw_plot(loaded, plot)


@app.command("compile")
def bench_compile(
    episodes: Annotated[int, typer.Option(help="The number of episodes.")] = 256,
    calls: Annotated[int, typer.Option(help="Calls per episode, about 1,000 tokens each.")] = 16,
    as_json: Json = False,
) -> None:
    """Measure the compiler on one core: tokens per second, memory, and the same for ten times the calls."""
    from benchmarks.compiler import run_compile

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


@app.command("actor")
def bench_actor(
    model: Annotated[str, typer.Option(help="A model shape, with random weights, or a model folder.")] = "qwen2.5-3b",
    shapes: Annotated[
        str, typer.Option(help="Shapes of calls, comma-separated: q2, q8, q16, audit, append.")
    ] = "q2,q8,q16",
    batches: Annotated[str, typer.Option(help="Multiples of the trajectories of a shape, comma-separated.")] = "1,2,4",
    episodes: Annotated[Path | None, typer.Option(help="An episode store to use instead of shapes.")] = None,
    dtype: Annotated[Precision, typer.Option(help="The precision of the models.")] = Precision.bfloat16,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the layers with torch.compile in all arms.")
    ] = True,
    repeats: Repeats = 5,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure an actor's forward and backward pass over the same calls: independent, merged and packed."""
    from benchmarks.shapes import MODELS, NAMES, episodes_of, random_model
    from memopd.record import read_episodes

    if episodes is not None:
        work = [(episodes.name, 1, list(read_episodes(episodes)))]
    else:
        named, times = chosen(shapes, "shape", NAMES), numbers(batches)
        work = [(s, b, episodes_of(s, b)) for b in times for s in named]

    import torch

    from benchmarks.actor import compile_layers, run_actor
    from benchmarks.timing import matmul_peak

    kind = getattr(torch, dtype)
    policy = random_model(model, kind, device()) if model in MODELS else load_model(model, dtype)
    compiled = compiled and device() == "cuda"
    if compiled:
        compile_layers(policy)
    peak = matmul_peak(kind, device())
    runs = (run_actor(policy, e, name, batch, peak, repeats, compiled) for name, batch, e in track("actor", work))
    tflops = round(peak / 1e12, 1)
    report(runs, as_json, plot, model=model, dtype=dtype, compiled=compiled, matmul_tflops=tflops)


@app.command("peers")
def bench_peers(
    model: Annotated[str, typer.Option(help="A model shape, with random weights, or a model folder.")] = "qwen2.5-3b",
    shapes: Annotated[
        str, typer.Option(help="Shapes of calls, comma-separated: q2, q8, q16, samples, tree, audit, append.")
    ] = "q2,q8,q16,samples,tree,audit",
    batch: Annotated[int, typer.Option(help="A multiple of the trajectories of a shape.")] = 1,
    episodes: Annotated[Path | None, typer.Option(help="An episode store to use instead of shapes.")] = None,
    first: Annotated[int, typer.Option(help="The number of episodes of the store.")] = 64,
    dtype: Annotated[Precision, typer.Option(help="The precision of the model.")] = Precision.bfloat16,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the layers with torch.compile in all arms.")
    ] = True,
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Compare MemOPD with TRL's trie, PrefixGrouper, split and merged rows on the same calls: time, memory, error."""
    from benchmarks.shapes import MODELS, NAMES, episodes_of, random_model
    from memopd.record import read_episodes

    if episodes is not None:
        work = [(episodes.name, list(islice(read_episodes(episodes), first)))]
    else:
        work = [(name, episodes_of(name, batch)) for name in chosen(shapes, "shape", NAMES)]

    import torch

    from benchmarks.actor import compile_layers
    from benchmarks.peers import CHECKED_LAYERS, run_peers

    if model in MODELS:
        policy = random_model(model, getattr(torch, dtype), device())
        check, checked = random_model(model, torch.float32, device(), CHECKED_LAYERS), f"{CHECKED_LAYERS} layers of it"
    else:
        policy, check, checked = load_model(model, dtype), load_model(model, Precision.float32), "the same model"
    compiled = compiled and device() == "cuda"
    if compiled:
        compile_layers(policy)
    runs = (run_peers(policy, check, checked, e, name, batch, repeats, compiled) for name, e in track("peers", work))
    report(runs, as_json, model=Path(model).name, dtype=dtype, compiled=compiled)


@app.command("head")
def bench_head(
    decisions: Annotated[int, typer.Option(help="The number of sampled tokens.")] = 8192,
    vocabulary: Annotated[int, typer.Option(help="The size of the vocabulary.")] = 151_936,
    widths: Annotated[
        str, typer.Option(help="Hidden sizes as student:teacher, comma-separated.")
    ] = "2048:3584,2048:2048,3584:3584",
    dtype: Annotated[Precision, typer.Option(help="The precision of the models.")] = Precision.bfloat16,
    repeats: Repeats = 5,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure log p, entropy and reverse KL over the full vocabulary, forward and backward."""
    pairs = [tuple(numbers(pair, ":")) for pair in widths.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"--widths takes student:teacher pairs such as 2048:3584, got {widths!r}")

    import torch

    from benchmarks.head import run_head

    kind = getattr(torch, dtype)
    arms = (run_head(decisions, vocabulary, s, t, kind, device(), repeats) for s, t in track("head", pairs))
    report(arms, as_json, plot, dtype=dtype)


@app.command("attention")
def bench_attention(
    rows: Annotated[str, typer.Option(help="Rows of the tries, comma-separated.")] = "1024,4096,16384,65536",
    depths: Annotated[str, typer.Option(help="Depths of the tries, comma-separated.")] = "2,4,8",
    calls: Annotated[str, typer.Option(help="Approximate numbers of calls, comma-separated.")] = "8,64,512",
    dtype: Annotated[Precision, typer.Option(help="The precision of the models.")] = Precision.bfloat16,
    repeats: Repeats = 5,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure the attention kernels alone, on tries of several depths and sizes."""
    row_counts, trie_depths, call_counts = (numbers(values) for values in (rows, depths, calls))

    import torch

    from benchmarks.attention import sweep

    kind = getattr(torch, dtype)
    kernels = track("attention", sweep(row_counts, trie_depths, call_counts, kind, device(), repeats))
    report(kernels, as_json, plot, dtype=dtype)


@app.command("rce")
def bench_rce(
    model: Annotated[str, typer.Option(help="A model shape, with random weights.")] = "qwen2.5-3b",
    shapes: Annotated[str, typer.Option(help="Shapes of calls, comma-separated.")] = "q2,q16",
    dtypes: Annotated[str, typer.Option(help="Precisions, comma-separated.")] = "float32,bfloat16",
    attentions: Annotated[str, typer.Option(help="Attention kernels, comma-separated.")] = "cascade,flex",
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Also compare gradients.")] = True,
    as_json: Json = False,
) -> None:
    """Compare packed logits and gradients with those of every call alone. The exit status is 1 if a check fails."""
    from benchmarks.shapes import MODELS, NAMES

    chosen(model, "model shape", MODELS)
    precisions, named = chosen(dtypes, "precision", list(Precision)), chosen(shapes, "shape", NAMES)
    kernels = chosen(attentions, "attention", ATTENTIONS)

    import torch

    from benchmarks.rce import run_rce

    work = track("rce", [(d, s) for d in precisions for s in named])
    checks = (r for d, s in work for r in run_rce(model, s, getattr(torch, d), kernels, device(), gradients))
    results = report(checks, as_json, model=model)
    ok = all(r.logits.passed and (r.gradients is None or r.gradients.passed) for r in results)
    raise typer.Exit(0 if ok else 1)


@app.command("audit")
def bench_audit(
    model: Annotated[str, typer.Option(help="A model shape, with random weights, or a model folder.")] = "qwen2.5-3b",
    shape: Annotated[str, typer.Option(help="The shape of the calls: q2, q8, q16, audit, append.")] = "q2",
    episodes: Annotated[Path | None, typer.Option(help="An episode store to use instead of a shape.")] = None,
    dtype: Annotated[Precision, typer.Option(help="The precision of the model.")] = Precision.float32,
    as_json: Json = False,
) -> None:
    """Measure an audit stage by stage, and its vocabulary pass against comparing pair by pair."""
    from benchmarks.shapes import MODELS, NAMES, episodes_of, random_model
    from memopd.record import read_episodes

    chosen(shape, "shape", NAMES)
    recorded = episodes_of(shape) if episodes is None else list(read_episodes(episodes))

    import torch

    from benchmarks.audit import run_audit

    policy = random_model(model, getattr(torch, dtype), device()) if model in MODELS else load_model(model, dtype)
    report(run_audit(Path(model).name, policy, recorded), as_json, dtype=dtype)


@app.command("host")
def bench_host(
    layers: Annotated[int, typer.Option(min=1, help="The number of layers.")] = 24,
    adapters: Annotated[str, typer.Option(help="Numbers of adapters, comma-separated.")] = "0,3",
    repeats: Repeats = 5,
    as_json: Json = False,
) -> None:
    """Measure what the host spends to start a pass: compiled layers with attention outside, or as one graph."""
    counts = numbers(adapters)
    from benchmarks.host import run_host

    report(run_host(layers, counts, repeats), as_json)


@app.command("engine")
def bench_engine(
    models: Annotated[
        str, typer.Option(help="Model sizes of the embedded world, with random weights: 3m, 10m.")
    ] = "3m,10m",
    dtype: Annotated[Precision, typer.Option(help="The precision of the models.")] = Precision.float32,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Also measure transformers' generate with a compiled step.")
    ] = True,
    vllm: Annotated[
        Path | None, typer.Option(help="A Python interpreter that has vLLM, to measure a server as well.")
    ] = None,
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """Compare the local engine with transformers' generate and continuous batching and with vLLM."""
    import torch

    from benchmarks.engine import run_engine

    kind = getattr(torch, dtype)
    sizes = track("engine", models.split(","))
    runs = (run_engine(name, kind, device(), repeats, compiled, vllm) for name in sizes)
    report(runs, as_json, dtype=dtype)


@app.command("retrieval")
def bench_retrieval(
    corpus: Annotated[Path | None, typer.Option(help="Your own corpus; by default a synthetic one.")] = None,
    questions: Annotated[Path | None, typer.Option(help="Questions in FlashRAG's format with supporting_ids.")] = None,
    passages: Annotated[int, typer.Option(help="The number of passages of the synthetic corpus.")] = 100_000,
    queries: Annotated[int, typer.Option(help="The number of queries.")] = 1000,
    as_json: Json = False,
) -> None:
    """Measure the lexical index, the same index as a service for 32 clients, and bm25s, on one corpus."""
    from benchmarks.retrieval import run_retrieval

    report(run_retrieval(corpus, questions, passages, queries), as_json)


@app.command("recall")
def bench_recall(
    questions: Annotated[list[str], typer.Argument(help="Questions in FlashRAG's format with supporting_ids.")],
    corpus: Annotated[list[Path], typer.Option(help="A corpus with their passages; several are joined.")],
    model: Annotated[
        str | None, typer.Option(help="An embedding model, to compare the dense and the hybrid index as well.")
    ] = None,
    passages: Annotated[int | None, typer.Option(help="Use only this many passages: the gold ones and others.")] = None,
    sample: Annotated[int, typer.Option(help="Questions of each data set, drawn at random.")] = 150,
    seed: Annotated[int, typer.Option(help="The seed of both.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure how often the first three passages contain a gold passage, or all of them, for each kind of index."""
    from benchmarks.recall import run_recall

    name = Path(model).name if model else ""
    report(run_recall(corpus, questions, model, passages, sample, seed), as_json, embedding_model=name)


@app.command("growth")
def bench_growth(
    sizes: Annotated[str, typer.Option(help="Numbers of passages, comma-separated.")] = "100000,1000000",
    queries: Annotated[int, typer.Option(help="The number of queries.")] = 1000,
    as_json: Json = False,
) -> None:
    """Measure how a lexical index grows with its corpus."""
    from benchmarks.growth import run_growth

    report(run_growth(numbers(sizes), queries), as_json)


@app.command("update")
def bench_update(
    student: Annotated[
        str, typer.Option(help="The shape of the student and the critic, with random weights.")
    ] = "qwen2.5-3b",
    teacher: Annotated[str, typer.Option(help="The shape of the teacher, with random weights.")] = "qwen2.5-7b",
    batch: Annotated[int, typer.Option(help="Multiples of four Q2 trajectories.")] = 16,
    dtype: Annotated[Precision, typer.Option(help="The precision of the models.")] = Precision.bfloat16,
    as_json: Json = False,
) -> None:
    """Measure one whole update (scoring, PPO, distillation), packed and with every call in its own rows."""
    from benchmarks.shapes import MODELS

    chosen(f"{student},{teacher}", "model shape", MODELS)

    from benchmarks.update import run_update

    report(run_update(student, teacher, device(), batch, dtype), as_json, dtype=dtype)


@app.command("step")
def bench_step(
    config: Annotated[Path, typer.Argument(help="A configuration of memopd train.")],
    student: Annotated[str | None, typer.Option(help="Another student than the configuration's.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Another teacher, without the configuration's adapter.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Another Parquet file of tasks.")] = None,
    index: Annotated[str | None, typer.Option(help="Another index.")] = None,
    budget: Annotated[int | None, typer.Option(help="Another number of rows per pack.", min=1)] = None,
    arms: Annotated[str, typer.Option(help="Arms, comma-separated.")] = ",".join(STEP_ARMS),
    updates: Annotated[int, typer.Option(help="Updates per arm, of which the first is not counted.", min=2)] = 4,
    rank: Annotated[int, typer.Option(help="The rank of the adapters.", min=1)] = 16,
    critic: Annotated[bool, typer.Option("--critic/--no-critic", help="Train a critic (PPO); else GRPO.")] = False,
    against: Annotated[str | None, typer.Option(help="A commit, or another source tree: its arms take turns.")] = None,
    rounds: Annotated[int, typer.Option(help="Processes per arm and tree.", min=1)] = 1,
    profile: Annotated[bool, typer.Option("--profile", help="Also profile one more update of every arm.")] = False,
    together: Annotated[
        bool, typer.Option("--together", help="All arms warm up at the same time, if they fit into memory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure updates by stage, and memory by part: packed and unshared, all weights and LoRA, against another tree.

    All arms start from model.student; merge an adapter into it first (memopd merge)."""
    from benchmarks.step import run_step
    from memopd.config import load_config

    named = {"model.student": student, "model.teacher": teacher, "tasks.train": tasks, "tasks.index": index,
             "model.teacher_adapter": None if teacher is None else "",
             "optimise.budget": None if budget is None else str(budget)}  # fmt: skip
    settings = load_config(config, {name: value for name, value in named.items() if value is not None})
    chosen_arms = chosen(arms, "arm", STEP_ARMS)
    if together and rounds > 1:
        raise ValueError("--together starts every arm once: leave out --rounds")
    results = run_step(settings, chosen_arms, updates, rank, critic, against, rounds, profile, together)
    report(results, as_json, dtype=settings.model.dtype, budget=settings.optimise.budget)


@app.command("drift")
def bench_drift(
    output: Annotated[Path, typer.Argument(help="A folder for the runs; runs that are there are continued.")],
    config: Annotated[Path, typer.Option(help="A configuration of memopd train.")] = Path("configs/quickstart.toml"),
    steps: Annotated[int, typer.Option(help="Updates per run.", min=2)] = 200,
    seed: Annotated[int, typer.Option(help="The seed of all runs.")] = 0,
    tasks: Annotated[str | None, typer.Option(help="Another Parquet file of tasks than the configuration's.")] = None,
    index: Annotated[str | None, typer.Option(help="Another index.")] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compare training packed and unshared, update by update, on the same episodes and each on its own."""
    from benchmarks.drift import run_drift
    from memopd.config import load_config

    named = {"tasks.train": tasks, "tasks.index": index}
    settings = load_config(config, {name: value for name, value in named.items() if value is not None})
    report(run_drift(settings, output, steps, seed), as_json, plot, dtype=settings.model.dtype)


if __name__ == "__main__":
    run(app)
