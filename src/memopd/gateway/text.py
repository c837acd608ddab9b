"""The text that a client receives for sampled ids, as a whole or as a stream. It ends at the stop string.

Special tokens are left out of it. The engine looks for stop strings in the text with special tokens, so a stop string
may contain the text of one; the cut is made there, and then the special tokens are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from memopd.types import Ids

_CONTEXT = 4  # ids to decode before a text, because some tokenizers drop the space at the beginning of one


def special_ids(tokenizer: Any, marks: Collection[str] = ()) -> frozenset[int]:
    """The ids that the text leaves out. `marks` are special tokens that it keeps, such as those of tool calls."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(i for i, token in added if token.special and token.content not in marks)


def visible_text(
    tokenizer: Any, ids: Ids, stops: Sequence[str], keep_stop: bool = False, marks: Collection[str] = ()
) -> str:
    """The text without special tokens, up to the stop string, which `keep_stop` includes."""
    return cut_text(tokenizer, ids, stops, keep_stop, marks).visible


@dataclass(frozen=True, slots=True)
class Cut:
    """A text that ends at its stop string."""

    visible: str
    full: str  # with special tokens
    stopped_by: str | None


def cut_text(
    tokenizer: Any, ids: Ids, stops: Sequence[str], keep_stop: bool = False, marks: Collection[str] = ()
) -> Cut:
    """The text up to the stop string, which `keep_stop` includes."""
    whole = _whole(tokenizer, ids, marks)
    found = _first(whole.text, stops)
    if found is None:
        return Cut(whole.visible(0, len(whole.text)), whole.text, None)
    past, at = found
    end = past if keep_stop else at
    return Cut(whole.visible(0, end), whole.text[:end], whole.text[at:past])


def full_text(tokenizer: Any, ids: Ids, shown: int) -> str:
    """The text with special tokens that has this many visible characters, and the special tokens directly after it."""
    whole, end = _whole(tokenizer, ids, ()), shown
    for start, stop in whole.hidden:
        if start > end:
            break
        end += stop - start
    return whole.text[:end]


def _whole(tokenizer: Any, ids: Ids, marks: Collection[str]) -> _Pieces:
    whole = _Pieces()
    hidden, before = special_ids(tokenizer, marks), list[int]()
    for is_hidden, run in groupby(ids.tolist(), hidden.__contains__):
        some = list(run)
        whole.add(_full(tokenizer, some) if is_hidden else _after(tokenizer, before, some), is_hidden)
        before = before if is_hidden else [*before, *some][-_CONTEXT:]
    return whole


class StreamedText:
    """Decodes ids one by one. It returns only text that no later id can change."""

    def __init__(
        self, tokenizer: Any, stops: Sequence[str], keep_stop: bool = False, marks: Collection[str] = ()
    ) -> None:
        self._tokenizer, self._stops, self._keep_stop = tokenizer, stops, keep_stop
        self._hidden = special_ids(tokenizer, marks)
        self._ids: list[int] = []  # the ids since the second last point at which they decoded to complete characters
        self._complete = 0  # how many of them are before the last such point
        self._pieces = _Pieces()
        self._shown = 0  # in the text with special tokens
        self._given = 0  # without them
        self._stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that is certain now."""
        for id in ids:
            if id in self._hidden:
                self._pieces.add(_after(self._tokenizer, self._ids[: self._complete], self._ids[self._complete :]))
                self._pieces.add(_full(self._tokenizer, [id]), is_hidden=True)
                self._complete = len(self._ids)
                continue
            self._ids.append(id)
            new = _after(self._tokenizer, self._ids[: self._complete], self._ids[self._complete :])
            if new and not new.endswith("\ufffd"):  # half a character decodes to the replacement character
                self._pieces.add(new)
                del self._ids[: max(0, min(self._complete, len(self._ids) - _CONTEXT))]
                self._complete = len(self._ids)
        return self._show()

    def end(self, text: str) -> str:
        """The rest of the complete text."""
        return text[self._given :]

    def _show(self) -> str:
        if self._stopped:
            return ""
        text = self._pieces.text
        found = _first(text, self._stops, self._shown)
        self._stopped = found is not None
        past, at = found or (0, 0)
        end = (past if self._keep_stop else at) if found else len(text) - pending(text, self._stops)
        new = self._pieces.visible(self._shown, end)
        self._shown = max(self._shown, end)
        self._given += len(new)
        return new


@dataclass(slots=True)
class _Pieces:
    """A text with special tokens, and where these are."""

    text: str = ""
    hidden: tuple[tuple[int, int], ...] = ()

    def add(self, text: str, is_hidden: bool = False) -> None:
        if is_hidden:
            self.hidden = (*self.hidden, (len(self.text), len(self.text) + len(text)))
        self.text += text

    def visible(self, start: int, end: int) -> str:
        parts = []
        for a, b in self.hidden:
            if start < b and a < end:
                parts.append(self.text[start : max(start, a)])
                start = b
        return "".join(parts) + self.text[start : max(start, end)]


def pending(text: str, strings: Iterable[str]) -> int:
    """How many characters at the end may be the beginning of one of these strings."""
    strings = list(strings)
    longest = max(map(len, strings), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(string.startswith(text[-n:]) for string in strings):
            return n
    return 0


def _after(tokenizer: Any, before: list[int], ids: list[int]) -> str:
    """The text that these ids add to the ones before them."""
    if not ids:
        return ""
    first, both = _decoded(tokenizer, before), _decoded(tokenizer, before + ids)
    return both[len(first) :] if both.startswith(first) else _decoded(tokenizer, ids)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    """The text of ids among which no hidden one is."""
    return _full(tokenizer, ids) if ids else ""


def _full(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _first(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, int] | None:
    """The end and the start of the stop string that was complete first, because there the engine stopped."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found) if found else None
