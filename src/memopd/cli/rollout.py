"""Episodes: sample and record them, and say what they are worth."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from memopd.cli.options import Json, Precision, device, err, load_model, out, plain

app = typer.Typer()
log = logging.getLogger("memopd")

PART, PART_SECONDS = 256, 60.0  # episodes appear in the store so many at once, or all that a minute finished


class Policy(StrEnum):
    oracle = "oracle"
    careless = "careless"  # an oracle that misreads a quarter of what it finds
    guess = "guess"


class Grading(StrEnum):
    squad = "squad"
    mem1 = "mem1"


Tasks = Annotated[Path, typer.Argument(metavar="TASKS", help="Parquet or JSON lines of tasks.")]
Index = Annotated[str, typer.Option(help="An index folder, or the URL of a retrieval service.")]
Model = Annotated[str | None, typer.Option(help="The policy: a folder or a hub name.")]
Servers = Annotated[str | None, typer.Option(help="vLLM servers with that model, comma-separated.")]
Scripted = Annotated[Policy | None, typer.Option(help="A scripted policy instead of a model.")]
Tokenizer = Annotated[str | None, typer.Option(help="The tokenizer, for a scripted policy.")]
Memory = Annotated[str, typer.Option(help="The context-update rule: mem1, full_response, suffix:64, ...")]
Limit = Annotated[int | None, typer.Option(help="Only the first so many tasks.", min=1)]
Temperature = Annotated[float, typer.Option()]
MaxTokens = Annotated[int, typer.Option(help="Of a response.")]
MaxContext = Annotated[int, typer.Option(help="Of a prompt: an episode that needs more ends.")]
Batch = Annotated[int, typer.Option(help="Episodes at once.")]
Topk = Annotated[int, typer.Option(help="Documents that a search finds.", min=1)]
Seed = Annotated[int, typer.Option()]
Train = Annotated[Path | None, typer.Option(help="Training tasks, for --policy guess to look answers up in.")]


@app.command()
def rollout(
    tasks: Tasks,
    output: Annotated[Path, typer.Option("-o", "--output", help="The episode store; goes on where it stopped.")],
    index: Index,
    model: Model = None,
    servers: Servers = None,
    policy: Scripted = None,
    tokenizer: Tokenizer = None,
    memory: Memory = "mem1",
    samples: Annotated[int, typer.Option(help="Episodes a task.", min=1)] = 1,
    limit: Limit = None,
    temperature: Temperature = 1.0,
    max_tokens: MaxTokens = 1000,
    max_context: MaxContext = 4096,
    topk: Topk = 3,
    batch: Batch = 64,
    seed: Seed = 0,
    dtype: Annotated[Precision, typer.Option()] = Precision.float32,
    train: Train = None,
) -> None:
    """Sample episodes and record every call: the ids it read, the ids it sampled, their log-probabilities."""
    from memopd.agent.rollout import repeat
    from memopd.record import read_episodes, write_episodes
    from memopd.tasks.files import read_tasks
    from memopd.types import Sampling

    pairs = list(repeat(read_tasks(tasks)[:limit], samples))
    if output.suffix == ".parquet":
        raise ValueError(f"{output}: give a folder: episodes are added to it as they finish")
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    there = any(output.glob("*.parquet")) if output.is_dir() else False
    done = {e.id for e in read_episodes(output) if like(e, output, seed, memory, sampling)} if there else set()
    pairs = [pair for pair in pairs if pair[0] not in done]
    if done:
        log.info(f"{output}: has {len(done)} episodes already, {len(pairs)} to go")
    episodes = Run(
        pairs, index, model, servers, policy, tokenizer, memory, sampling, max_context, batch, seed, dtype, train, topk
    ).episodes()
    written = sum(write_episodes(output, part) for part in parts(progress(episodes, len(pairs))))
    print(f"{output}: {written + len(done)} episodes")


@app.command()
def evaluate(
    tasks: Annotated[list[Path], typer.Argument(metavar="TASKS...", help="Files of tasks, e.g. Q2, Q8 and Q16.")],
    index: Index,
    model: Model = None,
    servers: Servers = None,
    policy: Scripted = None,
    tokenizer: Tokenizer = None,
    memory: Memory = "mem1",
    limit: Limit = None,
    temperature: Temperature = 1.0,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, those that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only so many of the likeliest tokens; 0: all.")] = 0,
    max_tokens: MaxTokens = 1000,
    max_context: MaxContext = 4096,
    topk: Topk = 3,
    batch: Batch = 64,
    seeds: Annotated[int, typer.Option(help="Runs with seeds 0, 1, ...", min=1)] = 1,
    grading: Annotated[Grading, typer.Option()] = Grading.squad,
    name: Annotated[str, typer.Option(help="What the table calls the system.")] = "",
    against: Annotated[Path | None, typer.Option(help="JSON of another system on the same tasks.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write JSON there, per task too.")] = None,
    dtype: Annotated[Precision, typer.Option()] = Precision.float32,
    train: Train = None,
    as_json: Json = False,
) -> None:
    """EM, F1, peak, dependency and time: the columns of the paper's Tables 1 and 2."""
    from memopd.cli.evaluation import evaluate as run
    from memopd.types import Sampling

    sampling = Sampling(temperature, top_p, top_k, max_tokens)
    results = run(
        tasks,
        lambda pairs, seed: Run(
            pairs, index, model, servers, policy, tokenizer, memory, sampling, max_context, batch, seed, dtype, train,
            topk,
        ),
        limit, seeds, grading, name or model or str(policy), f"{'vLLM' if servers else 'local'}, {device_name(policy)}",
        batch, progress,
    )  # fmt: skip
    if output is not None:
        from memopd.files import whole

        with whole(output) as partial:
            partial.write_text(json.dumps(plain(results.as_dict()), indent=1) + "\n")
    if as_json:
        print(json.dumps(plain(results.as_dict())))
    else:
        for table in results.tables(against):
            out.print(table)


def device_name(policy: Policy | None) -> str:
    return "scripted" if policy else device()


def like(episode: Any, store: Path, seed: int, memory: str, sampling: Any) -> bool:
    """Whether a store that is to be gone on with was begun with these settings; an error that says which differs."""
    for name, was, now in (
        ("--seed", episode.seed, seed),
        ("--memory", episode.memory, memory),
        ("--temperature", episode.sampling.temperature, sampling.temperature),
        ("--max-tokens", episode.sampling.max_tokens, sampling.max_tokens),
    ):
        if was != now:
            raise ValueError(f"{store}: has episodes sampled with {name} {was}, not {now}: choose another store")
    return True


def parts(episodes: Iterator[Any]) -> Iterator[list[Any]]:
    """What is finished goes to the store now and then: whoever kills a rollout loses a minute of it."""
    part, begun = [], time.monotonic()
    for episode in episodes:
        part.append(episode)
        if len(part) == PART or time.monotonic() - begun > PART_SECONDS:
            yield part
            part, begun = [], time.monotonic()
    if part:
        yield part


def progress(episodes: Iterator[Any], total: int) -> Iterator[Any]:
    """A bar with episodes/s and sampled tokens/s on a terminal; silence elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress("episodes", *columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        begin, tokens = time.monotonic(), 0
        task = bar.add_task("", total=total, rate="")
        for n, episode in enumerate(episodes, 1):
            tokens += sum(len(c.completion) for c in episode.calls)
            spent = max(time.monotonic() - begin, 1e-9)
            bar.update(task, advance=1, rate=f"{n / spent:.1f}/s, {tokens / spent:,.0f} tokens/s")
            yield episode


class Run:
    """One policy in one environment: everything that an episode needs."""

    def __init__(
        self, pairs: list[tuple[str, Any]], index: str, model: str | None, servers: str | None,
        policy: Policy | None, tokenizer: str | None, memory: str, sampling: Any, max_context: int, batch: int,
        seed: int, dtype: Precision, train: Path | None, topk: int,
    ) -> None:  # fmt: skip
        if (model is None) == (policy is None):
            raise ValueError("give --model, or --policy for a scripted one")
        if policy and not tokenizer:
            raise ValueError("--policy needs --tokenizer: a folder that has one")
        from memopd.agent.environment import SearchEnvironment
        from memopd.agent.memory import memory_rule
        from memopd.agent.rollout import codec_of
        from memopd.models.load import load_tokenizer
        from memopd.retrieval import open_index

        self.pairs = pairs
        self.tokenizer = load_tokenizer(str(tokenizer or model))
        self.memory = memory_rule(memory, codec_of(self.tokenizer))
        self.rule = memory
        self.environment = SearchEnvironment(open_index(index), topk, query=self.memory.query)
        self.sampling, self.seed, self.batch, self.max_context = sampling, seed, batch, max_context
        self.engine = self._engine(model, servers, policy, dtype, train, max_context + sampling.max_tokens)

    def episodes(self) -> Iterator[Any]:
        from memopd.agent.rollout import rollout

        try:
            yield from rollout(
                self.engine, self.environment, self.memory, self.tokenizer, self.pairs, self.sampling, self.seed,
                self.batch, self.max_context, self.rule,
            )  # fmt: skip
        finally:
            if hasattr(self.engine, "close"):
                self.engine.close()

    def _engine(
        self, model: str | None, servers: str | None, policy: Policy | None, dtype: Precision, train: Path | None,
        max_length: int,
    ) -> Any:  # fmt: skip
        from memopd.tasks.files import read_tasks
        from memopd.world.oracle import CARELESS, Guesser, Oracle

        if policy is Policy.oracle:
            return Oracle(self.pairs, self.tokenizer, self.seed)
        if policy is Policy.careless:
            return Oracle(self.pairs, self.tokenizer, self.seed, CARELESS)
        if policy is Policy.guess:
            known = [q for task in read_tasks(train) for q in task.questions] if train else []
            return Guesser(self.pairs, self.tokenizer, known)
        assert model is not None
        if servers:
            from memopd.engine.vllm import VllmEngine

            return VllmEngine(servers.split(","), self.tokenizer)
        from memopd.engine.local import LocalEngine

        loaded = load_model(model, dtype)
        reach = getattr(loaded.config.get_text_config(), "max_position_embeddings", None)
        if reach and max_length > reach:
            raise ValueError(
                f"--max-context {self.max_context} and --max-tokens {self.sampling.max_tokens} make {max_length} "
                f"positions, {model} has {reach}: lower one of them"
            )
        return LocalEngine(loaded, self.tokenizer, slots=self.batch, max_length=max_length)
