"""Episodes: sample and record them, and measure what they are worth."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

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


@dataclass(frozen=True, slots=True)
class Play:
    """The options of every verb that plays: who, in what, and how much of it."""

    model: Annotated[str | None, typer.Option(help="The policy: a folder or a hub name.")] = None
    servers: Annotated[str | None, typer.Option(help="vLLM servers with that model, comma-separated.")] = None
    policy: Annotated[Policy | None, typer.Option(help="A scripted policy instead of a model.")] = None
    tokenizer: Annotated[str | None, typer.Option(help="The tokenizer, for a scripted policy.")] = None
    train: Annotated[Path | None, typer.Option(help="Training tasks in which --policy guess looks answers up.")] = None
    index: Annotated[str, typer.Option(help="An index folder, or the URL of a retrieval service.")] = ""
    environment: Annotated[str, typer.Option(help="search, or module:Class.")] = "search"
    memory: Annotated[str, typer.Option(help="mem1, full_response, suffix:64, ..., or module:Class.")] = "mem1"
    reward: Annotated[str, typer.Option(help="em, f1, or module:function.")] = "em"
    topk: Annotated[int, typer.Option(help="Documents that a search finds.", min=1)] = 3
    limit: Annotated[int | None, typer.Option(help="Only the first so many tasks.", min=1)] = None
    temperature: Annotated[float, typer.Option()] = 1.0
    max_tokens: Annotated[int, typer.Option(help="Of a response.")] = 1000
    max_context: Annotated[int, typer.Option(help="Of a prompt: an episode that needs more ends.")] = 4096
    batch: Annotated[int, typer.Option(help="Episodes at once.")] = 64
    dtype: Annotated[Precision, typer.Option()] = Precision.float32


def plays(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of `Play`, in place of its parameter `play`."""
    own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name != "play"]
    kinds, keyword = get_type_hints(Play, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(f.name, keyword, default=f.default, annotation=kinds[f.name]) for f in fields(Play)]

    @wraps(verb)
    def with_options(**given: Any) -> None:
        play = Play(**{f.name: given.pop(f.name) for f in fields(Play)})
        verb(play=play, **given)

    parameters = [*(p.replace(kind=keyword) for p in own), *shared]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


@app.command()
@plays
def rollout(
    tasks: Tasks,
    output: Annotated[Path, typer.Option("-o", "--output", help="The episode store; goes on where it stopped.")],
    play: Play,
    samples: Annotated[int, typer.Option(help="Episodes per task.", min=1)] = 1,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Sample episodes and record every call: the ids it read, the ids it sampled, their log-probabilities."""
    from memopd.agent import repeat
    from memopd.record import read_episodes, write_episodes
    from memopd.tasks.files import read_tasks
    from memopd.types import Sampling

    sampling = Sampling(temperature=play.temperature, max_tokens=play.max_tokens)
    check(play)
    pairs = list(repeat(read_tasks(tasks)[: play.limit], samples))
    if output.suffix == ".parquet":
        raise ValueError(f"{output}: give a folder: episodes are added to it as they finish")
    there = any(output.glob("*.parquet")) if output.is_dir() else False
    done = {e.id for e in read_episodes(output) if like(e, output, seed, play.memory, sampling)} if there else set()
    pairs = [pair for pair in pairs if pair[0] not in done]
    if done:
        log.info(f"{output}: has {len(done)} episodes already, {len(pairs)} to go")
    agent = agents(play, sampling)(pairs, seed)
    episodes = (episode for episode, _ in played(agent, pairs, seed))
    written = sum(write_episodes(output, part) for part in parts(progress(episodes, len(pairs))))
    print(f"{output}: {written + len(done)} episodes")


@app.command()
@plays
def evaluate(
    tasks: Annotated[list[Path], typer.Argument(metavar="TASKS...", help="Files of tasks, e.g. Q2, Q8 and Q16.")],
    play: Play,
    top_p: Annotated[float, typer.Option(help="Of the likeliest tokens, those that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only so many of the likeliest tokens; 0: all.")] = 0,
    seeds: Annotated[int, typer.Option(help="Runs with seeds 0, 1, ...", min=1)] = 1,
    grading: Annotated[Grading, typer.Option()] = Grading.squad,
    name: Annotated[str, typer.Option(help="What the table calls the system.")] = "",
    against: Annotated[Path | None, typer.Option(help="JSON of another system on the same tasks.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write JSON there, per task too.")] = None,
    as_json: Json = False,
) -> None:
    """EM, F1, peak, dependency and time: the columns of the paper's Tables 1 and 2."""
    from memopd.cli.evaluation import evaluate as run
    from memopd.evaluate import Setting
    from memopd.types import Sampling

    sampling = Sampling(play.temperature, top_p, top_k, play.max_tokens)
    check(play)
    agent_of = agents(play, sampling, grading)
    engine = f"{'vLLM' if play.servers else 'local'}, {'scripted' if play.policy else device()}"

    def sample(pairs: list[tuple[str, Any]], seed: int) -> Iterator[Any]:
        return progress(played(agent_of(pairs, seed), pairs, seed), len(pairs), lambda pair: pair[0])

    setting = Setting(str(grading), engine, play.batch)  # type: ignore[arg-type]
    results = run(tasks, sample, play.limit, seeds, name or play.model or str(play.policy), setting)
    if output is not None:
        from memopd.files import whole

        with whole(output) as partial:
            partial.write_text(json.dumps(plain(results.as_dict()), indent=1) + "\n")
    if as_json:
        print(json.dumps(plain(results.as_dict())))
    else:
        for table in results.tables(against):
            out.print(table)


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


def progress(items: Iterator[Any], total: int, episode_of: Callable[[Any], Any] = lambda item: item) -> Iterator[Any]:
    """A bar with episodes/s and sampled tokens/s on a terminal; silence elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress("episodes", *columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        begin, tokens = time.monotonic(), 0
        task = bar.add_task("", total=total, rate="")
        for n, item in enumerate(items, 1):
            tokens += sum(len(c.completion) for c in episode_of(item).calls)
            spent = max(time.monotonic() - begin, 1e-9)
            bar.update(task, advance=1, rate=f"{n / spent:.1f}/s, {tokens / spent:,.0f} tokens/s")
            yield item


def check(play: Play) -> None:
    """Mistakes in the options, before anything is loaded."""
    from memopd.agent.parts import check_parts

    if (play.model is None) == (play.policy is None):
        raise ValueError("give --model, or --policy for a scripted one")
    if play.policy and not play.tokenizer:
        raise ValueError("--policy needs --tokenizer: a folder that has one")
    check_parts(tasks_config(play), flag="--")


def tasks_config(play: Play, grading: Grading = Grading.squad) -> Any:
    from memopd.config import TasksConfig

    return TasksConfig(
        index=play.index, environment=play.environment, memory=play.memory, topk=play.topk,
        max_context=play.max_context, reward=play.reward, grading=grading.value,
    )  # fmt: skip


def agents(play: Play, sampling: Any, grading: Grading = Grading.squad) -> Callable[[list[tuple[str, Any]], int], Any]:
    """The agent for some tasks and a seed. The model is loaded once; engines and scripted policies are made anew."""
    from memopd.agent import Agent
    from memopd.agent.parts import build_parts
    from memopd.models.load import load_tokenizer

    tokenizer = load_tokenizer(str(play.tokenizer or play.model))
    environment, memory = build_parts(tasks_config(play, grading), tokenizer, flag="--")
    engine_of = scripted(play, tokenizer) if play.policy else sampled(play, tokenizer)

    def agent(pairs: list[tuple[str, Any]], seed: int) -> Agent:
        return Agent(
            engine_of(pairs, seed), environment, memory, tokenizer, sampling, play.batch, play.max_context, play.memory
        )  # fmt: skip

    return agent


def scripted(play: Play, tokenizer: Any) -> Callable[[list[tuple[str, Any]], int], Any]:
    from memopd.tasks.files import read_tasks
    from memopd.world.oracle import CARELESS, Guesser, Oracle

    if play.policy is Policy.guess:
        known = [q for task in read_tasks(play.train) for q in task.questions] if play.train else []
        return lambda pairs, seed: Guesser(pairs, tokenizer, known)
    misreads = CARELESS if play.policy is Policy.careless else 0.0
    return lambda pairs, seed: Oracle(pairs, tokenizer, seed, misreads)


def sampled(play: Play, tokenizer: Any) -> Callable[[list[tuple[str, Any]], int], Any]:
    assert play.model is not None
    if play.servers:
        from memopd.engine.vllm import VllmEngine

        servers = play.servers.split(",")
        return lambda pairs, seed: VllmEngine(servers, tokenizer)
    from memopd.engine.local import LocalEngine

    model, length = load_model(play.model, play.dtype), play.max_context + play.max_tokens
    reach = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if reach and length > reach:
        raise ValueError(
            f"--max-context {play.max_context} and --max-tokens {play.max_tokens} make {length} positions, "
            f"{play.model} has {reach}: lower one of them"
        )
    return lambda pairs, seed: LocalEngine(model, tokenizer, slots=play.batch, max_length=length)


def played(agent: Any, pairs: list[tuple[str, Any]], seed: int) -> Iterator[Any]:
    """Episodes with their outcomes; then the engine is closed."""
    try:
        yield from agent.graded(pairs, seed)
    finally:
        if hasattr(agent.engine, "close"):
            agent.engine.close()
