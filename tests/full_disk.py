"""A disk that is really full: a small file system in memory. Only root may mount one, others skip these."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def disk(place: Path, kilobytes: int) -> Iterator[Path]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", place]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def resize(place: Path, kilobytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kilobytes}k", place], check=True)
