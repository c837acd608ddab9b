"""`memopd rollout` and `memopd evaluate`: sample and record episodes, and measure them."""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from memopd.cli.options import (
    Adapter,
    Convention,
    Json,
    Precision,
    check_adapter,
    check_new,
    device,
    err,
    load_sampler,
    out,
    plain,
    policy_name,
)

app = typer.Typer()
log = logging.getLogger("memopd")

# Finished episodes are written to the store after this many episodes or seconds, whichever comes first.
PART, PART_SECONDS = 256, 60.0

MADE_BY = "rollout.json"  # in a store: the provenance of its episodes
# The options that all episodes of a store have in common, besides those that each episode records.
COMMON = ("model", "adapter", "policy", "environment", "turns", "prompt", "reward", "grading", "topk", "max_context")


class Policy(StrEnum):
    oracle = "oracle"
    careless = "careless"  # an oracle that misreads a quarter of what it finds
    guess = "guess"


class Grading(StrEnum):
    squad = "squad"
    mem1 = "mem1"


Tasks = Annotated[Path, typer.Argument(metavar="TASKS", help="A file of tasks: Parquet or JSON lines.")]


@dataclass(frozen=True, slots=True)
class Play:
    """The options that `rollout` and `evaluate` share."""

    model: Annotated[str | None, typer.Option(help="The policy: a folder or a hub name.")] = None
    adapter: Adapter = None
    servers: Annotated[
        str | None, typer.Option(help="URLs of vLLM servers that sample from the model, comma-separated.")
    ] = None
    policy: Annotated[Policy | None, typer.Option(help="A scripted policy instead of a model.")] = None
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer folder; required with --policy.")] = None
    train: Annotated[Path | None, typer.Option(help="Training tasks from which --policy guess takes its answers.")] = (
        None
    )
    index: Annotated[str, typer.Option(help="An index folder, or the URL of a retrieval service.")] = ""
    environment: Annotated[str, typer.Option(help="The environment: search, or module:Class.")] = "search"
    memory: Annotated[
        str, typer.Option(help="The memory rule: mem1, full_response, suffix:64, ..., or module:Class.")
    ] = "mem1"
    protocol: Convention = None
    turns: Annotated[int, typer.Option(help="The most turns per episode; 0: 2k + 2 for k questions.", min=0)] = 0
    prompt: Annotated[
        str,
        typer.Option(help="A text file with the user turn, with {questions} where the questions go; by default ours."),
    ] = ""
    reward: Annotated[
        str, typer.Option(help="The reward: em, f1, em_partial (MEM1's in training), or module:function.")
    ] = "em"
    grading: Annotated[Grading, typer.Option(help="How answers are normalised before they are compared.")] = (
        Grading.squad
    )
    topk: Annotated[int, typer.Option(help="Documents per search.", min=1)] = 3
    limit: Annotated[int | None, typer.Option(help="Play only this many tasks, the first ones.", min=1)] = None
    temperature: Annotated[float, typer.Option(help="The sampling temperature.")] = 1.0
    top_p: Annotated[
        float,
        typer.Option(
            help="Sample only from the likeliest tokens that together have this probability; below 1, training cannot "
            "use the episodes."
        ),
    ] = 1.0
    top_k: Annotated[
        int, typer.Option(help="Sample only from this many of the likeliest tokens; 0 means all. For training: 0.")
    ] = 0
    max_tokens: Annotated[int, typer.Option(help="The most tokens per response.")] = 1000
    max_context: Annotated[int, typer.Option(help="The most tokens per prompt; an episode that needs more ends.")] = (
        4096
    )
    batch: Annotated[int, typer.Option(help="Episodes that run at once.")] = 64
    dtype: Annotated[Precision, typer.Option(help="The precision of the model.")] = Precision.float32


def takes_play_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Play` in place of its parameter `play`."""
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "play"]
    kinds, keyword = get_type_hints(Play, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    shared = [inspect.Parameter(f.name, keyword, default=f.default, annotation=kinds[f.name]) for f in fields(Play)]

    @wraps(command)
    def with_options(context: typer.Context, **given: Any) -> None:
        play = Play(**{f.name: given.pop(f.name) for f in fields(Play)})
        command(play=with_protocol(play, context), **given)

    source = inspect.Parameter("context", keyword, annotation=typer.Context)
    parameters = [source, *(p.replace(kind=keyword) for p in own), *shared]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def with_protocol(play: Play, context: typer.Context) -> Play:
    """Put the settings of `--protocol` in place of those that the user did not give."""
    from memopd.config import EVALUATED, PROTOCOLS

    if play.protocol is None:
        return play
    settings = PROTOCOLS[play.protocol] | (EVALUATED[play.protocol] if context.command.name == "evaluate" else {})
    sources = {name: context.get_parameter_source(name) for name in settings}
    unset = {
        name: settings[name] for name, source in sources.items() if source is not None and source.name == "DEFAULT"
    }
    made = replace(play, **unset)
    return replace(made, grading=Grading(made.grading))


@dataclass(slots=True)
class Stored:
    """What a store has."""

    episodes: int = 0
    calls: int = 0
    sampled_tokens: int = 0
    rewards: float = 0.0

    def counted(self, episodes: Iterable[Any]) -> Iterator[Any]:
        for episode in episodes:
            self.episodes += 1
            self.calls += len(episode.calls)
            self.sampled_tokens += sum(len(c.completion) for c in episode.calls)
            self.rewards += episode.reward
            yield episode

    @property
    def mean_reward(self) -> float | None:
        return self.rewards / self.episodes if self.episodes else None

    def as_dict(self) -> dict[str, Any]:
        counts = {"episodes": self.episodes, "calls": self.calls, "sampled_tokens": self.sampled_tokens}
        return counts | {"mean_reward": self.mean_reward}

    def __str__(self) -> str:
        reward = "" if self.mean_reward is None else f", mean reward {self.mean_reward:.3f}"
        return f"{self.episodes:,} episodes, {self.calls:,} calls, {self.sampled_tokens:,} sampled tokens{reward}"


def sampling_of(play: Play) -> Any:
    from memopd.types import Sampling

    return Sampling(play.temperature, play.top_p, play.top_k, play.max_tokens)


@app.command()
@takes_play_options
def rollout(
    tasks: Tasks,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="The episode store (a folder). If it exists, missing episodes are added."),
    ],
    play: Play,
    samples: Annotated[int, typer.Option(help="Episodes per task.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="The seed of the sampling.")] = 0,
    as_json: Json = False,
) -> None:
    """Sample episodes and record every call: the tokens it read, the tokens it sampled, and their log-probabilities."""
    from memopd.agent import repeat
    from memopd.record import read_episodes, write_episodes
    from memopd.tasks.files import read_tasks

    sampling = sampling_of(play)
    check(play)
    pairs = list(repeat(read_tasks(tasks)[: play.limit], samples))
    if output.suffix == ".parquet":
        raise ValueError(f"{output}: must be a folder: episodes are added to it as they finish")
    done, stored = set(), Stored()
    if output.is_dir() and any(output.glob("*.parquet")):
        for episode in stored.counted(read_episodes(output)):
            check_same_settings(episode, output, seed, play.memory, sampling)
            done.add(episode.id)
    pairs = [pair for pair in pairs if pair[0] not in done]
    if done:
        log.info(f"{output}: has {len(done)} episodes already; {len(pairs)} are missing")
    keep_provenance(output, provenance_of(play, [tasks], {"samples": samples, "seed": seed}), is_empty=not done)
    if play.model and sampling.training_note:
        log.warning(f"{output}: {sampling.training_note}")
    agent = agents(play, sampling)(pairs, seed)
    episodes = stored.counted(episode for episode, _ in played(agent, pairs, seed))
    for part in in_parts(progress(episodes, len(pairs))):
        write_episodes(output, part)
    print(json.dumps({"output": str(output), **stored.as_dict()}) if as_json else f"{output}: {stored}")


@app.command()
@takes_play_options
def evaluate(
    tasks: Annotated[
        list[Path], typer.Argument(metavar="TASKS...", help="Files of tasks, for example Q2, Q8 and Q16.")
    ],
    play: Play,
    seeds: Annotated[int, typer.Option(help="The number of runs; their seeds are 0, 1, ...", min=1)] = 1,
    name: Annotated[
        str, typer.Option(help="The name of the system in the tables; by default the model or policy.")
    ] = "",
    against: Annotated[
        Path | None, typer.Option(help="JSON of another system on the same tasks, to compare with.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="A new JSON file for the results, with those of every task."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure EM, F1, peak, dependency and time, the columns of the paper's Tables 1 and 2."""
    from memopd.cli.evaluation import evaluate as run
    from memopd.cli.evaluation import read_other
    from memopd.evaluate import Setting

    if output is not None:
        check_new(output)
    other = None if against is None else read_other(against, tasks, play.limit)
    sampling = sampling_of(play)
    check(play)
    agent_of = agents(play, sampling)
    engine = f"{'vLLM' if play.servers else 'local'}, {'scripted' if play.policy else device()}"

    def sample(pairs: list[tuple[str, Any]], seed: int) -> Iterator[Any]:
        return progress(played(agent_of(pairs, seed), pairs, seed), len(pairs), lambda pair: pair[0])

    made = provenance_of(play, tasks, {"seeds": seeds})
    system = policy_name(play.model, play.adapter) if play.model else str(play.policy)
    setting = Setting(play.grading.value, engine, play.batch)
    results = run(tasks, sample, play.limit, seeds, name or system, setting, made)
    if output is not None:
        from memopd.files import whole

        with whole(output) as partial:
            partial.write_text(json.dumps(plain(results.as_dict()), indent=1) + "\n")
    if as_json:
        print(json.dumps(plain(results.as_dict())))
    else:
        for table in results.tables(other):
            out.print(table)


def provenance_of(play: Play, tasks: Sequence[Path], more: dict[str, Any]) -> dict[str, Any]:
    """All options, and the digests of the files that they name."""
    from memopd.evaluate.provenance import provenance

    settings = {name: value if value is None or isinstance(value, int | float) else str(value)
                for name, value in asdict(play).items()}  # fmt: skip
    inputs = {name: getattr(play, name) for name in ("model", "adapter", "tokenizer", "index", "prompt", "train")}
    return provenance(settings | more, {"tasks": list(tasks), **inputs}) | {"device": device()}


def check_same_settings(episode: Any, store: Path, seed: int, memory: str, sampling: Any) -> None:
    """Raise an error if a recorded episode was sampled with other settings, for one store must not mix them."""
    for name, before, now in (
        ("--seed", episode.seed, seed),
        ("--memory", episode.memory, memory),
        ("--temperature", episode.sampling.temperature, sampling.temperature),
        ("--top-p", episode.sampling.top_p, sampling.top_p),
        ("--top-k", episode.sampling.top_k, sampling.top_k),
        ("--max-tokens", episode.sampling.max_tokens, sampling.max_tokens),
    ):
        if before != now:
            raise ValueError(f"{store}: has episodes sampled with {name} {before}, not {now}: choose another store")


def keep_provenance(store: Path, made: dict[str, Any], is_empty: bool) -> None:
    """Write the provenance into a store. If that has episodes, it must agree with theirs."""
    from memopd.files import read_object, whole

    if is_empty or not (store / MADE_BY).is_file():
        with whole(store / MADE_BY) as partial:
            partial.write_text(json.dumps(made, indent=1) + "\n")
        return
    before = read_object(store / MADE_BY)
    for name in COMMON:
        was, now = (one.get("settings", {}).get(name) for one in (before, made))
        if was != now:
            raise ValueError(f"{store}: has episodes made with --{name.replace('_', '-')} {was}: choose another store")
        was, now = (one.get("inputs", {}).get(name) for one in (before, made))
        if was != now:
            raise ValueError(
                f"{store}: {made['settings'][name]} has changed since its episodes were made: choose another"
            )
    for name in ("index", "train"):  # they may have moved; a service has no digest
        was, now = ((one.get("inputs", {}).get(name) or {}).get("sha256") for one in (before, made))
        if was and now and was != now:
            raise ValueError(
                f"{store}: has episodes made with another --{name} than {made['settings'][name]}: choose another store"
            )


def in_parts(episodes: Iterator[Any]) -> Iterator[list[Any]]:
    """Split the stream so that finished episodes reach the store often: a killed rollout loses at most a minute."""
    part, start = [], time.monotonic()
    for episode in episodes:
        part.append(episode)
        if len(part) == PART or time.monotonic() - start > PART_SECONDS:
            yield part
            part, start = [], time.monotonic()
    if part:
        yield part


def progress(items: Iterator[Any], total: int, episode_of: Callable[[Any], Any] = lambda item: item) -> Iterator[Any]:
    """Show a bar with episodes/s and sampled tokens/s on a terminal, and nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress("episodes", *columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        start, tokens = time.monotonic(), 0
        task = bar.add_task("", total=total, rate="")
        for n, item in enumerate(items, 1):
            tokens += sum(len(c.completion) for c in episode_of(item).calls)
            spent = max(time.monotonic() - start, 1e-9)
            bar.update(task, advance=1, rate=f"{n / spent:.1f}/s, {tokens / spent:,.0f} tokens/s")
            yield item


def check(play: Play) -> None:
    """Report mistakes in the options before anything is loaded."""
    from memopd.agent.parts import check_parts

    if (play.model is None) == (play.policy is None):
        raise ValueError("give either --model, or --policy for a scripted policy")
    if play.adapter and play.model is None:
        raise ValueError("--adapter needs --model: the model that it was trained on")
    if play.policy and not play.tokenizer:
        raise ValueError("--policy needs --tokenizer: a folder with a tokenizer")
    check_parts(tasks_config(play), flag="--")


def tasks_config(play: Play) -> Any:
    from memopd.config import TasksConfig

    return TasksConfig(
        index=play.index, environment=play.environment, memory=play.memory, topk=play.topk,
        max_context=play.max_context, reward=play.reward, grading=play.grading.value, turns=play.turns,
        prompt=play.prompt,
    )  # fmt: skip


def agents(play: Play, sampling: Any) -> Callable[[list[tuple[str, Any]], int], Any]:
    """Return a function that makes the agent for some tasks and a seed.

    The model is loaded once; every agent has its own engine or scripted policy.
    """
    from memopd.agent import Agent
    from memopd.agent.codec import check_template
    from memopd.agent.parts import build_parts
    from memopd.models.load import load_tokenizer

    tokenizer = load_tokenizer(str(play.tokenizer or play.model))
    check_template(tokenizer)
    environment, memory = build_parts(tasks_config(play), tokenizer, flag="--")
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

        servers, adapter = play.servers.split(","), check_adapter(play.adapter, play.model)
        return lambda pairs, seed: VllmEngine(servers, tokenizer, adapter=adapter)
    from memopd.engine.local import LocalEngine

    model, length = load_sampler(play.model, play.dtype, play.adapter), play.max_context + play.max_tokens
    available = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if available and length > available:
        raise ValueError(
            f"--max-context {play.max_context} and --max-tokens {play.max_tokens} need {length} positions, "
            f"but {play.model} has {available}: lower one of them"
        )
    return lambda pairs, seed: LocalEngine(model, tokenizer, slots=play.batch, max_length=length)


def played(agent: Any, pairs: list[tuple[str, Any]], seed: int) -> Iterator[Any]:
    """Yield episodes with their outcomes, then close the engine."""
    try:
        yield from agent.graded(pairs, seed, frees_model=False)
    finally:
        if hasattr(agent.engine, "close"):
            agent.engine.close()
