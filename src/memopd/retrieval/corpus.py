"""A corpus in the format of wiki-18: JSON lines with `id` and `contents`, plain or gzipped.

    {"id": "17", "contents": "\\"Velmora Works\\"\\nVelmora Works is a maker of clocks in Tarn."}

`contents` is the title line, in double quotes, and the text. Rows are read one at a time, so a corpus need not fit in
memory.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Self

from memopd.files import json_object, lines, whole


@dataclass(frozen=True, slots=True)
class Passage:
    """
    >>> Passage("17", "Velmora Works", "A maker of clocks.").contents
    '"Velmora Works"\\nA maker of clocks.'
    """

    id: str
    title: str
    text: str

    @classmethod
    def of(cls, id: str, contents: str) -> Self:
        """Split the `contents` of wiki-18. The quotes around the title may be missing, as in other corpora."""
        title, newline, text = contents.partition("\n")
        if not newline:
            raise ValueError("contents: must be a title line, a newline and the text")
        if len(title) >= 2 and title[0] == title[-1] == '"':
            title = title[1:-1]
        return cls(id, title, text)

    @property
    def contents(self) -> str:
        return f'"{self.title}"\n{self.text}'


@dataclass(slots=True)
class Corpus:
    """The passages of a file, in its order. After a pass, `skipped` is the number of skipped rows."""

    path: Path
    skip_bad: bool = False
    skipped: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Passage]:
        self.skipped = 0
        seen: set[str] = set()
        for number, line in lines(self.path):
            try:
                passage = _passage(line)
                if passage.id in seen:
                    raise ValueError(f"id: {passage.id!r} is also the id of an earlier row")
            except ValueError as why:
                if not self.skip_bad:
                    hint = "correct the row, or skip such rows with --skip-bad"
                    raise ValueError(f"{self.path}: line {number}: {why}; {hint}") from None
                self.skipped += 1
                continue
            seen.add(passage.id)
            yield passage

    def __length_hint__(self) -> int:
        """Estimate the number of rows for progress bars, from the size of the first thousand."""
        with self.path.open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if self.path.suffix == ".gz" else raw
            try:
                rows = sum(1 for _ in islice(file, 1000))
            except (EOFError, OSError, zlib.error):
                return 0  # the pass over the file will report the error
            return rows * self.path.stat().st_size // max(raw.tell(), 1)


def read_corpus(path: Path | str, skip_bad: bool = False) -> Corpus:
    """Read a corpus. A malformed row raises an error that names file and line; `skip_bad` skips and counts them."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a corpus is a .jsonl or .jsonl.gz file")
    return Corpus(path, skip_bad)


def write_corpus(path: Path, passages: Iterable[Passage]) -> int:
    """Write a corpus, and return the number of passages."""
    count = 0
    with whole(path) as partial, partial.open("w", encoding="utf-8") as file:
        for passage in passages:
            file.write(json.dumps({"id": passage.id, "contents": passage.contents}, ensure_ascii=False) + "\n")
            count += 1
    return count


def _passage(line: bytes) -> Passage:
    row = json_object(line)
    for name in ("id", "contents"):
        if name not in row:
            raise ValueError(f"{name}: missing")
    id, contents = row["id"], row["contents"]
    if type(id) is int:  # not isinstance, for which true is an integer
        id = str(id)
    if not isinstance(id, str) or not id:
        raise ValueError(f"id: must be a string, not empty, got {row['id']!r}")
    if not isinstance(contents, str):
        raise ValueError(f"contents: must be a string, got {type(contents).__name__}")
    try:
        (id + contents).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which no text file can hold") from None
    return Passage.of(id, contents)
