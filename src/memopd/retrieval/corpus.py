"""A corpus in the format of wiki-18: JSON lines with `id` and `contents`, plain or gzipped.

    {"id": "17", "contents": "\\"Velmora Works\\"\\nVelmora Works is a maker of clocks in Tarn."}

`contents` is the title line, in double quotes, and the text. Rows are read one at a time, so a corpus need not fit in
memory. Other corpora have `title` and `text` instead, and perhaps no id, or are one list in a .json file, which is read
whole. The text may be a list of sentences, as in the corpora of HotpotQA (`text`) and 2WikiMultihopQA (`sentences`). A
passage without an id gets a digest of its title and text.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

from memopd.files import json_object, json_value, lines, whole
from memopd.tasks.rows import joined, passage_id


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
        for place, row in _rows(self.path):
            try:
                passage = _passage(json_object(row) if isinstance(row, bytes) else row)
                if passage.id in seen:
                    raise ValueError(f"id: {passage.id!r} is also the id of an earlier row")
            except ValueError as why:
                if not self.skip_bad:
                    hint = "correct the row, or skip such rows with --skip-bad"
                    raise ValueError(f"{self.path}: {place}: {why}; {hint}") from None
                self.skipped += 1
                continue
            seen.add(passage.id)
            yield passage

    def __length_hint__(self) -> int:
        """Estimate the number of rows for progress bars, from the size of the first thousand."""
        if _is_list(self.path):
            return 0  # a list may be a single line
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
        raise ValueError(f"{path}: no such file; a corpus is a .jsonl or .json file, or one of these as .gz")
    return Corpus(path, skip_bad)


def write_corpus(path: Path, passages: Iterable[Passage]) -> int:
    """Write a corpus, and return the number of passages."""
    count = 0
    with whole(path) as partial, partial.open("w", encoding="utf-8") as file:
        for passage in passages:
            file.write(json.dumps({"id": passage.id, "contents": passage.contents}, ensure_ascii=False) + "\n")
            count += 1
    return count


def _is_list(path: Path) -> bool:
    return path.name.endswith((".json", ".json.gz"))


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a corpus, each with its place: lines as bytes, or the items of a list."""
    if not _is_list(path):
        yield from ((f"line {number}", line) for number, line in lines(path))
        return
    value = json_value(path)
    if not isinstance(value, list):
        raise ValueError(f"{path}: a .json corpus must be one list of passages; name lines of JSON .jsonl")
    yield from ((f"item {number}", item) for number, item in enumerate(value))


def _passage(row: Any) -> Passage:
    if not isinstance(row, dict):
        raise ValueError("must be a JSON object")
    if "contents" not in row and "title" in row and {"text", "sentences"} & row.keys():
        return _titled(row)
    for name in ("id", "contents"):
        if name not in row:
            raise ValueError(f"{name}: missing")
    contents = row["contents"]
    if not isinstance(contents, str):
        raise ValueError(f"contents: must be a string, got {type(contents).__name__}")
    return Passage.of(_id(row["id"], contents), contents)


def _titled(row: dict[str, Any]) -> Passage:
    title, text = row["title"], row["text"] if "text" in row else row["sentences"]
    if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
        text = joined(text)
    if not isinstance(title, str) or not isinstance(text, str):
        raise ValueError("title, text: must be strings, or the text a list of sentences")
    given = next((row[name] for name in ("id", "_id", "idx") if row.get(name) is not None), passage_id(title, text))
    return Passage(_id(given, title + text), " ".join(title.split()), text)


def _id(id: Any, contents: str) -> str:
    """Check an id, and that it and the contents can be stored."""
    text = str(id) if type(id) is int else id  # not isinstance, for which true is an integer
    if not isinstance(text, str) or not text:
        raise ValueError(f"id: must be a string, not empty, got {id!r}")
    try:
        (text + contents).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which no text file can hold") from None
    return text
