"""`python -m paper NAME`: reproduces a table or figure of the paper at the scale of the embedded world."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.config import overrides
from memopd.cli.options import numbers, run, track

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Name(StrEnum):
    main = "main"
    single = "single"
    control = "control"
    state = "state"
    rules = "rules"
    corruption = "corruption"
    domain = "domain"
    packing = "packing"


TRAINED = (Name.main, Name.single, Name.control)
WORK, OUTPUT = Path("runs/paper"), Path("paper/results")


class Split(StrEnum):
    dev = "dev"
    test = "test"


@app.command()
def experiment(
    names: Annotated[list[Name], typer.Argument(metavar="NAME...", help=f"The experiments: {', '.join(Name)}.")],
    config: Annotated[
        Path | None, typer.Option(help="The settings of the experiment; by default paper/configs/NAME.toml.")
    ] = None,
    work: Annotated[Path, typer.Option(help="The folder for runs and results. Existing ones are reused.")] = WORK,
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder for tables and pictures.")] = OUTPUT,
    split: Annotated[
        Split, typer.Option(help="The split to evaluate on; use dev to choose settings (main, single, control).")
    ] = Split.test,
    seeds: Annotated[str | None, typer.Option(help="Use only these seeds, for example 0,1.")] = None,
    arms: Annotated[str | None, typer.Option(help="Train only these arms of ppo, persistent, memopd.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Change a setting of the training, for example optimise.lr=1e-5.")
    ] = None,
    collect: Annotated[
        bool,
        typer.Option("--collect", help="Run nothing; only show the existing results of --work, or those in --output."),
    ] = False,
) -> None:
    """Reproduce tables and figures of the paper. Runs and results that already exist are reused."""
    if config is not None and len(names) > 1:
        raise ValueError("--config belongs to one experiment: name only that one")
    files = {name: config or Path("paper/configs") / f"{name}.toml" for name in names}
    failed = 0
    if trained := {name: file for name, file in files.items() if name in TRAINED}:
        failed = show_trained(
            trained, work, output, split, seeds, arms, overrides([f"--{c}" for c in change or ()], {}), collect
        )
    for name, file in files.items():
        if name not in TRAINED:
            failed += not show_recorded(name, file, work, output, collect)
    raise typer.Exit(1 if failed else 0)


def show_trained(
    files: dict[Name, Path], work: Path, output: Path, split: Split, seeds: str | None, arms: str | None,
    changed: dict[str, str], collect: bool,
) -> int:  # fmt: skip
    """Make all runs that main, single and control share, then show each experiment. Return the number of failures."""
    from paper.settings import Shown, Suite, chosen, load

    shown = {name: load(Shown, file) for name, file in files.items()}
    if len({one.suite for one in shown.values()}) > 1:
        raise ValueError(f"{', '.join(files)} use different suites: run them one by one")
    suite = chosen(
        load(Suite, Path(next(iter(shown.values())).suite)),
        None if arms is None else tuple(arms.split(",")),
        None if seeds is None else tuple(numbers(seeds)),
    )
    wanted = dict.fromkeys((s, k) for one in shown.values() for k in one.horizons for s in one.systems)
    from paper.suite import Work, make
    from paper.trained import rewritten, show

    parts = Work(suite, work, tuple(wanted), split, tuple(changed.items()))
    failed = {} if collect else make(parts)
    for name, one in shown.items():
        has_runs = not collect or any(parts.folder.glob(f"evaluations/{split}/*.json"))
        for path in show(name, one, parts, failed, output) if has_runs else rewritten(name, one, output):
            print(path)
    return len(failed)


def show_recorded(name: Name, file: Path, work: Path, output: Path, collect: bool) -> bool:
    """Measure a model on its own trajectories. Return False if packing was not exact."""
    from paper.page import Findings, provenance, reword, write_page
    from paper.settings import Recorded, load

    settings = load(Recorded, file)
    if collect:
        paths, passed = reword(name, settings, output), True
    else:
        from benchmarks.timing import machine
        from paper.trajectories import Subject

        found: Findings = import_module(f"paper.{name}").findings(Subject(settings, work, track))
        inputs = {name: getattr(settings, name) for name in ("model", "teacher", "tasks", "index")}
        made = provenance([machine()], asdict(settings), inputs) | {"passed": found.passed}
        paths, passed = write_page(name, settings, made, found, output), found.passed
    for path in paths:
        print(path)
    return passed


if __name__ == "__main__":
    run(app)
