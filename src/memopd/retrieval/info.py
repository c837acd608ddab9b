"""The small file in every index folder that says what it is: `memopd-index.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_NAME = "memopd-index.json"


@dataclass(frozen=True, slots=True)
class IndexInfo:
    kind: str  # "lexical" or "dense"
    passages: int
    skipped: int  # rows of the corpus that were left out
    corpus: str  # its file name
    corpus_sha256: str  # of the file as it lay on disk
    settings: dict[str, Any]  # what the answers depend on besides the corpus
    versions: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def write_info(folder: Path, info: IndexInfo) -> None:
    (folder / _NAME).write_text(json.dumps(info.as_dict(), indent=2) + "\n")


def read_info(folder: Path) -> IndexInfo:
    path = folder / _NAME
    if not path.is_file():
        what = "not an index" if folder.exists() else "no such folder"
        raise ValueError(f"{folder}: {what}; make one with `memopd index build CORPUS -o {folder}`")
    try:
        info = IndexInfo(**json.loads(path.read_text()))
    except (TypeError, ValueError) as why:
        raise ValueError(f"{path}: damaged ({why}); build the index again") from None
    if info.kind not in ("lexical", "dense"):
        raise ValueError(f"{path}: kind: must be lexical or dense, got {info.kind!r}; build the index again")
    return info
