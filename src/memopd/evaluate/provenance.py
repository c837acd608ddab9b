"""The provenance of a result: the code, the command, all settings, and digests of the files that were read.

    "provenance": {"command": ..., "date": ..., "memopd": "0.1.0", "commit": ..., "dirty": false, "versions": {...},
                   "settings": {...}, "inputs": {"model": {"path": ..., "sha256": ...}, "tasks": [...], ...}}

A path alone does not say what was read, because a file can change later. So a path stands beside the digest of its
content, and a command that reads a result calls `warn_changed`.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from memopd.files import DIGESTS, digest
from memopd.retrieval.index import INFO
from memopd.version import __version__

log = logging.getLogger("memopd")

ROOT = Path(__file__).parents[3]  # of the source tree, where there is one
CODE = ("src", "paper", "benchmarks", "configs", ":(exclude)*/results/*")
READ = (".safetensors", ".json", ".model", ".txt", ".jinja", ".parquet")  # the files of a folder that we load


def provenance(settings: Mapping[str, Any], inputs: Mapping[str, Any], program: str = "memopd") -> dict[str, Any]:
    """How a result is made. `inputs` has the path of each file and folder that is read, or a list of them."""
    return {
        "command": shlex.join([*shlex.split(program), *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        **source(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "settings": dict(settings),
        "inputs": {name: identities(where) for name, where in inputs.items() if where},
    }


@cache
def source() -> dict[str, Any]:
    """The version of this package; if it runs from a git checkout, its commit, and whether code was changed since."""
    commit = _git("rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    status = None if commit is None else _git("status", "--porcelain", "--", *CODE)
    return {"memopd": __version__, "commit": commit, "dirty": None if status is None else bool(status)}


def identities(where: Any) -> Any:
    """The identity of a path, or of each path in a list."""
    return [identity(one) for one in where] if isinstance(where, list | tuple) else identity(where)


def identity(where: str | Path) -> dict[str, str | None]:
    """A path or name, and the SHA-256 of its content. A service, and a model that is not on this disk, have none."""
    return {"path": str(where), "sha256": content_digest(str(where))}


def content_digest(where: str) -> str | None:
    """The digest of a file, of an index's description (which has that of its corpus), or of a model's files."""
    if where.startswith(("http://", "https://")):
        return None
    path = Path(where).expanduser()
    if not path.exists():
        cached = _cached_on_disk(where)
        if cached is None:
            return None
        path = cached
    if path.is_file():
        return digest(path)
    if (path / INFO).is_file():
        return digest(path / INFO)
    files = sorted(file for file in path.iterdir() if file.suffix in READ and file.name != DIGESTS)
    return hashlib.sha256("".join(f"{digest(file)}  {file.name}\n" for file in files).encode()).hexdigest()


def changed(made: Mapping[str, Any]) -> list[str]:
    """The paths of a result whose content is no longer what the result is of. Files that are gone do not count."""
    recorded = [one for one in _all_identities(made) if one["sha256"]]
    return [one["path"] for one in recorded if content_digest(one["path"]) not in (None, one["sha256"])]


def warn_changed(file: Path | str, made: Mapping[str, Any]) -> None:
    """Say which files behind a result have changed. Results of older versions recorded no digests."""
    for path in changed(made):
        log.warning("%s: %s has changed since: these results are of another version of it", file, path)


def _all_identities(made: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for found in made.get("inputs", {}).values():
        yield from found if isinstance(found, list) else [found]


def _cached_on_disk(name: str) -> Path | None:
    """The folder of a hub model that was downloaded before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _git(*arguments: str) -> str | None:
    """What git says of the source tree; None without git, or if it refuses."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
