"""Moves runs between machines in a few small files, for a GPU machine that you have for minutes.

    python -m paper.bring pack runs/real OUT      what was made there
    python -m paper.bring unpack OUT runs/real    goes on here, or on the next machine

A run travels as its adapter, configuration and metrics; evaluations travel too. With `--results` the adapters stay:
tables do not need them, and a run whose evaluations exist is not trained again. Checkpoints, episodes and traces stay
too, so `pack` leaves out a run that is not finished. Adapters travel in bfloat16, the precision in which they are
sampled: that is half the size, and the fingerprint in paper/evaluation.py is the same.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from memopd.cli.options import run
from memopd.files import DIGESTS, digest, whole

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

SIZE = 15 << 20  # of a part
PARTS = 8
NAME = "runs.tar.xz"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEPT = ("config.json", "metrics.jsonl")  # of a run, beside its adapter

Work = Annotated[Path, typer.Argument(metavar="WORK", help="The folder with the runs, for example runs/real.")]


@app.command()
def pack(
    work: Work,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write to.")],
    only: Annotated[
        str | None, typer.Option(help="Pack only these runs, for example ppo-0,memopd-0, and no evaluations.")
    ] = None,
    results_only: Annotated[
        bool, typer.Option("--results", help="Pack evaluations, configurations and metrics, but no adapters.")
    ] = False,
) -> None:
    """Pack finished runs and evaluations into at most eight files of 15 MiB."""
    if only and results_only:
        raise ValueError("--only names runs, --results leaves their adapters out: give one of them")
    runs = finished_runs(work, only.split(",") if only else None)
    results = [] if only else sorted(work.rglob("evaluations/**/*.json"))
    if not runs and not results:
        raise ValueError(f"{work}: has no finished run and no evaluation to pack")
    packed = _tar(work, runs, results, not results_only)
    if len(packed) > SIZE * PARTS:
        each = ", ".join(folder.name for folder in runs)
        raise ValueError(
            f"{work}: takes {len(packed) / 2**20:.0f} MiB, and {PARTS} files hold {SIZE * PARTS / 2**20:.0f}: pack in "
            f"several steps with --results and --only; the runs are {each}"
        )
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob(f"{NAME}.*"):
        old.unlink()
    for i in range(0, len(packed), SIZE):
        (output / f"{NAME}.{i // SIZE}").write_bytes(packed[i : i + SIZE])
    print(f"{output}: {len(runs)} runs, {len(results)} evaluations, {len(packed) / 2**20:.1f} MiB")


@app.command()
def unpack(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="The folder that `pack` wrote.")], work: Work
) -> None:
    """Unpack what `pack` wrote. A run that is finished here is kept as it is."""
    parts = sorted(folder.glob(f"{NAME}.*"))
    if not parts:
        raise ValueError(f"{folder}: has no {NAME}.0; name the folder that `pack` wrote")
    here = set(finished_runs(work)) if work.is_dir() else set()
    written = 0
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts)), mode="r:xz") as tar:
        contents: dict[str, bytes] = {}  # of the files that others are the same as
        for member in tar:
            content = _content(tar, member, contents)
            path = (work / member.name).resolve()
            if not path.is_relative_to(work.resolve()):
                raise ValueError(f"{folder}: {member.name!r} would be written outside of {work}")
            if here & set((work / member.name).parents):
                continue
            with whole(path) as partial:
                partial.write_bytes(content)
            written += 1
    print(f"{work}: {written} files written")


def finished_runs(work: Path, names: list[str] | None = None) -> list[Path]:
    """The run directories with an adapter, also those of SFT."""
    found = sorted(path.parent.parent for path in work.rglob(f"adapter/{CONFIG}"))
    if names is None:
        return found
    by_name = {folder.name: folder for folder in found}
    for name in names:
        if name not in by_name:
            raise ValueError(f"{work}: has no finished run {name!r}: choose from {', '.join(by_name)}")
    return [by_name[name] for name in names]


def _tar(work: Path, runs: list[Path], results: list[Path], adapters: bool) -> bytes:
    """An archive in which equal files, such as the tokenizers of all adapters, are stored once."""
    buffer, stored = io.BytesIO(), dict[bytes, str]()
    with tarfile.open(fileobj=buffer, mode="w:xz", preset=1) as tar:
        for path, content in _files(runs, results, adapters):
            info = tarfile.TarInfo(path.relative_to(work).as_posix())
            if content in stored:
                info.type, info.linkname = tarfile.LNKTYPE, stored[content]
                tar.addfile(info)
            else:
                stored[content], info.size = info.name, len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _files(runs: list[Path], results: list[Path], adapters: bool) -> Iterator[tuple[Path, bytes]]:
    for folder in runs:
        adapter = folder / "adapter"
        yield from ((folder / name, (folder / name).read_bytes()) for name in KEPT if (folder / name).is_file())
        if not adapters:
            continue
        made = {f: f.read_bytes() for f in sorted(adapter.iterdir()) if f.is_file() and f.name != DIGESTS}
        made[adapter / WEIGHTS] = in_half(adapter / WEIGHTS)
        if (adapter / DIGESTS).is_file():
            made[adapter / DIGESTS] = _digests(adapter / DIGESTS, made[adapter / WEIGHTS])
        last = adapter / CONFIG, made.pop(adapter / CONFIG)  # with it a run counts as finished
        yield from (*made.items(), last)
    yield from ((path, path.read_bytes()) for path in results)


def in_half(weights: Path) -> bytes:
    """An adapter's weights in bfloat16."""
    import torch
    from safetensors.torch import load_file, save

    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    return save(tensors, metadata={"format": "pt"})


def _digests(file: Path, weights: bytes) -> bytes:
    """The digests of the adapter's folder, with that of the rounded weights."""
    held = json.loads(file.read_text())
    if held.get(WEIGHTS) != digest(file.with_name(WEIGHTS)):
        raise ValueError(f"{file.parent}: its weights are damaged: make the run again")
    return (json.dumps(held | {WEIGHTS: hashlib.sha256(weights).hexdigest()}, indent=2) + "\n").encode()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo, contents: dict[str, bytes]) -> bytes:
    if member.islnk():
        return contents[member.linkname]
    file = tar.extractfile(member)
    if file is None:
        raise ValueError(f"{member.name!r}: only files can be unpacked")
    contents[member.name] = file.read()
    return contents[member.name]


if __name__ == "__main__":
    run(app)
