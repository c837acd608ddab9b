"""Commands for recorded calls: import them, measure the error of flattening them, draw them, check model families."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from memopd.cli.options import (
    Adapter,
    Attention,
    Json,
    Precision,
    device,
    err,
    load_model,
    out,
    plain,
    policy_name,
    track,
)  # fmt: skip

log = logging.getLogger("memopd")

app = typer.Typer()

_SHOWN_IDS = 5  # of the episodes of a store, in an error


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(help="Calls as JSON lines, or what verifiers, verl or SkyRL wrote (docs/episodes.md)."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The episode store to write.")],
    format: Annotated[
        str,
        typer.Option(
            help="calls (JSON lines), verifiers (traces.jsonl), verl (tq_batch.pt, gen_batch.dp, rows with a "
            "response_mask), skyrl (dumped batches), auto (whichever it is), or module:function for your own reader."
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Import recorded calls of any sampler or trainer into an episode store."""
    from memopd.record import import_episodes, read_episodes, write_episodes

    present = {e.id for e in read_episodes(output)} if output.exists() else set()

    def new_episodes() -> Iterator[Any]:  # raises before anything is written
        episode = None
        for episode in import_episodes(file, format):
            if episode.id in present:
                raise ValueError(f"{output}: already has episode {episode.id!r}; remove it, or choose another -o")
            yield episode
        if episode is None:
            raise ValueError(f"{file}: contains no calls")

    count = write_episodes(output, track("episodes", new_episodes()))
    said = f"{output}: {count} episode{'s' * (count > 1)}"
    print(json.dumps({"output": str(output), "episodes": count}) if as_json else said)


@app.command()
def audit(
    episodes: Annotated[list[Path] | None, typer.Argument(help="Episode stores to audit.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that sampled them: a folder or a hub name.")] = None,
    adapter: Adapter = None,
    teacher: Annotated[
        str | None, typer.Option(help="A teacher model: also measure how flattening changes its targets.")
    ] = None,
    dtype: Annotated[Precision, typer.Option(help="The precision of the models.")] = Precision.float32,
    attention: Attention = "auto",
    demo: Annotated[bool, typer.Option("--demo", help="Audit episodes that a tiny random model samples now.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A JSON file to write the report to.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how wrong flattened training is on these episodes, and check that packing is exact.

    The exit status is 1 if packing is not exact.
    """
    if demo == bool(episodes) or demo == (model is not None) or (demo and adapter):
        raise ValueError("give EPISODES and --model, or --demo alone")
    from memopd.record import read_episodes

    for store in episodes or ():  # a missing one is named before torch is imported, which takes seconds
        next(read_episodes(store), None)
    from memopd.attention import check_attention

    check_attention(attention, "--attention")
    recorded = [e for store in episodes or () for e in track("reading", read_episodes(store))]
    from memopd.verify.audit import audit as run_audit
    from memopd.verify.tables import print_audit

    if demo:
        import torch

        from memopd.verify.families import demo as make_demo

        policy, recorded = make_demo()
        policy = policy.to(device(), getattr(torch, dtype))
        name, tokenizer = "tiny random Qwen2", None
    else:
        assert model is not None
        policy, name = load_model(model, dtype, adapter), policy_name(model, adapter)
        tokenizer = _tokenizer(model)
    if teacher and model:
        from memopd.models.load import check_same_tokenizer

        check_same_tokenizer(os.path.expanduser(model), os.path.expanduser(teacher))
    guide = load_model(teacher, dtype) if teacher else None
    report = run_audit(policy, recorded, attention, guide, name, _stage, tokenizer)
    if output is not None:
        from memopd.files import whole

        with whole(output) as partial:
            partial.write_text(json.dumps(plain(report.as_dict()), indent=1) + "\n")
    if as_json:
        print(json.dumps(plain(report.as_dict())))
    else:
        print_audit(report, out)
    raise typer.Exit(0 if report.passed else 1)


def _tokenizer(model: str) -> Any:
    """The model's tokenizer, if it has one: a log of calls can be audited without."""
    from memopd.models.load import load_tokenizer

    try:
        return load_tokenizer(os.path.expanduser(model))
    except ValueError as why:
        log.warning("no tokenizer, so the arms encode nothing again and hide no thoughts: %s", why)
        return None


def _stage(name: str, items: Sequence[Any]) -> Iterable[Any]:
    """Show a stage of the audit, which may take minutes: a progress bar on a terminal, and a log line elsewhere."""
    if not err.is_terminal:
        log.info("audit: %s (%d)", name, len(items))
    return track(name, items)


@app.command()
def draw(
    episodes: Annotated[Path, typer.Argument(help="An episode store.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The image to write; its suffix names the format.")],
    episode: Annotated[
        str | None, typer.Option(help="The id of the episode to draw; a store of one needs none.")
    ] = None,
) -> None:
    """Draw the packed form of one episode as a picture."""
    found = _episode(episodes, episode)
    from memopd.attention.draw import draw as draw_pack
    from memopd.compile import compile_calls

    draw_pack(compile_calls(found.calls), output, f"episode {found.id}")
    print(output)


def _episode(store: Path, id: str | None) -> Any:
    """The episode with this id; without one, the only episode."""
    from memopd.record import read_episodes

    episode, ids = None, []
    for episode in read_episodes(store):
        if episode.id == id:
            return episode
        ids.append(episode.id)
    if id is None and len(ids) == 1:
        return episode
    if not ids:
        raise ValueError(f"{store}: has no episodes")
    some = ", ".join(ids[:_SHOWN_IDS]) + (", ..." if len(ids) > _SHOWN_IDS else "")
    if id is None:
        raise ValueError(f"{store}: choose one of its {len(ids)} episodes with --episode: {some}")
    raise ValueError(f"{store}: has no episode {id!r}; it has {some}")


@app.command()
def models(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="A Markdown file to write the table to.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check which model families can share rows, which run without sharing, and which are refused.

    Every family is run now, with tiny random weights.
    """
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
