"""`python -m paper NAME`: reproduces a table or figure of the paper, on real questions or in the embedded world."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memopd.cli.config import overrides
from memopd.cli.options import numbers, run, track

if TYPE_CHECKING:
    from paper.settings import Shown
    from paper.suite import Work

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Name(StrEnum):
    choices = "choices"
    main = "main"
    single = "single"
    control = "control"
    state = "state"
    rules = "rules"
    corruption = "corruption"
    domain = "domain"
    packing = "packing"


class Of(StrEnum):
    real = "real"  # pretrained models and real questions
    world = "world"  # small models and the embedded encyclopedia


TRAINED = (Name.main, Name.single, Name.control)
DEFAULT = Of.world
WORK = {Of.real: Path("runs/real"), Of.world: Path("runs/paper")}


class Split(StrEnum):
    dev = "dev"
    test = "test"


@app.command()
def experiment(
    names: Annotated[list[Name], typer.Argument(metavar="NAME...", help=f"The experiments: {', '.join(Name)}.")],
    of: Annotated[
        Of, typer.Option(help="real: pretrained models and real questions; world: the embedded world.")
    ] = DEFAULT,
    config: Annotated[
        Path | None,
        typer.Option(help="The settings of the experiment; by default NAME.toml in paper/real or paper/world."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option(
            help="The folder for runs and results, by default runs/real or runs/paper. Existing ones are reused."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="The folder for tables and pictures; by default results beside the settings."
        ),
    ] = None,
    split: Annotated[
        Split, typer.Option(help="The split to evaluate on; use dev to choose settings (main, single, control).")
    ] = Split.test,
    seeds: Annotated[str | None, typer.Option(help="Use only these seeds, for example 0,1.")] = None,
    arms: Annotated[
        str | None, typer.Option(help="Train only these arms of the suite, for example ppo,memopd.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Run only these jobs, for example train:ppo-0,evaluate:ppo-0, and make no tables."),
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(help="Processes that share the machine; by default as in the suite.", min=1)
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="End all processes after this time. The same command continues them.", min=0)
    ] = None,
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
    work, output = work or WORK[of], output or Path("paper") / of / "results"
    files = {name: config or Path("paper") / of / f"{name}.toml" for name in names}
    failed = 0
    if file := files.pop(Name.choices, None):
        unused = {"--only": only, "--arms": arms, "--seeds": seeds, "--split": None if split is Split.test else split}
        if given := [option for option, value in unused.items() if value is not None]:
            raise ValueError(f"{given[0]}: choices trains its own arms and evaluates them on dev; run it by itself")
        changed = overrides([f"--{c}" for c in change or ()], {})
        failed += show_choices(file, work, output, changed, concurrent, minutes, collect)
    if trained := {name: file for name, file in files.items() if name in TRAINED}:
        parts, shown = planned(trained, work, split, seeds, arms, overrides([f"--{c}" for c in change or ()], {}))
        if concurrent is not None:
            parts = replace(parts, suite=replace(parts.suite, concurrent=concurrent))
        if only is not None:
            raise typer.Exit(run_only(parts, only, minutes))
        failed += show_trained(parts, shown, output, minutes, collect)
    for name, file in files.items():
        if name not in TRAINED:
            failed += not show_recorded(name, file, work, output, collect)
    raise typer.Exit(1 if failed else 0)


def show_choices(
    file: Path, work: Path, output: Path, changed: dict[str, str], concurrent: int | None, minutes: float | None,
    collect: bool,
) -> int:  # fmt: skip
    """Choose settings on dev, and show what was chosen. Return the number of failures."""
    from paper.choices import choose, show
    from paper.settings import Choices, check_choices, load
    from paper.suite import Work

    settings = load(Choices, file)
    check_choices(settings, str(file))
    suite = settings if concurrent is None else replace(settings, concurrent=concurrent)
    parts = Work(suite, work, (), Split.dev, tuple(changed.items()))
    made = list(choose(settings, parts, deadline(minutes), collect))
    failed = {name: why for _, jobs in made for name, why in jobs.failed.items()}
    for path in show(settings, [one for one, _ in made], failed, output):
        print(path)
    for one, _ in made:
        print(f"{one.choice.setting}: {'not chosen yet' if one.value is None else f'{one.value:g}'}")
    return len(failed)


def planned(
    files: dict[Name, Path], work: Path, split: Split, seeds: str | None, arms: str | None, changed: dict[str, str]
) -> tuple[Work, dict[Name, Shown]]:
    """The runs that main, single and control share, and what each of them shows."""
    from paper.settings import Shown, Suite, check_systems, chosen, load, without
    from paper.suite import Work

    shown = {name: load(Shown, file) for name, file in files.items()}
    if len({one.suite for one in shown.values()}) > 1:
        raise ValueError(f"{', '.join(files)} use different suites: run them one by one")
    whole = load(Suite, Path(next(iter(shown.values())).suite))
    for name, one in shown.items():
        check_systems(one, whole, str(files[name]))
    suite = chosen(
        whole, None if arms is None else tuple(arms.split(",")), None if seeds is None else tuple(numbers(seeds))
    )
    shown = {name: without(one, whole.arms.keys() - suite.arms.keys()) for name, one in shown.items()}
    suite = replace(suite, arms=whole.arms)  # what is not shown is not wanted, but may be the same run under its name
    wanted = dict.fromkeys((s, k) for one in shown.values() for k in one.horizons for s in one.systems)
    return Work(suite, work, tuple(wanted), split, tuple(changed.items())), shown


def run_only(parts: Work, names: str, minutes: float | None) -> int:
    """Run the jobs of these names and return the exit status. An end of the time is no failure."""
    from paper.suite import make

    made = make(parts, names.split(","), deadline(minutes))
    for name in made.unfinished:
        print(f"not finished: {name}")
    return 1 if made.failed else 0


def show_trained(parts: Work, shown: dict[Name, Shown], output: Path, minutes: float | None, collect: bool) -> int:
    """Make all runs, then show each experiment. Return the number of failures."""
    from paper.jobs import Made
    from paper.suite import make
    from paper.trained import rewritten, show

    made = Made() if collect else make(parts, until=deadline(minutes))
    for name, one in shown.items():
        has_runs = not collect or any(parts.folder.glob(f"evaluations/{parts.split}/*.json"))
        for path in show(name, one, parts, made.failed, output) if has_runs else rewritten(name, one, output):
            print(path)
    return len(made.failed)


def deadline(minutes: float | None) -> float | None:
    return None if minutes is None else time.monotonic() + 60 * minutes


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
        read = ("model", "adapter", "teacher", "teacher_adapter", "tasks", "index")
        inputs = {name: getattr(settings, name) for name in read}
        made = provenance([machine()], asdict(settings), inputs) | {"passed": found.passed}
        paths, passed = write_page(name, settings, made, found, output), found.passed
    for path in paths:
        print(path)
    return passed


if __name__ == "__main__":
    run(app)
