"""The text that a client receives for sampled ids, as a whole or as a stream. It ends at the stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memopd.types import Ids


def visible_text(tokenizer: Any, ids: Ids, stops: Sequence[str], keep_stop: bool = False) -> str:
    """The text without special tokens, up to the stop string, which `keep_stop` includes."""
    text = _decoded(tokenizer, ids.tolist())
    end = _end(text, stops, keep_stop)
    return text if end is None else text[:end]


class StreamedText:
    """Decodes ids one by one. It returns only text that no later id can change."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], keep_stop: bool = False) -> None:
        self._tokenizer, self._stops, self._keep_stop = tokenizer, stops, keep_stop
        self._ids: list[int] = []  # the ids since the second last point at which they decoded to complete characters
        self._complete = 0  # how many of them are before the last such point
        self._text = ""
        self._shown = 0
        self._stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that is certain now."""
        for id in ids:
            self._ids.append(id)
            before = _decoded(self._tokenizer, self._ids[: self._complete])
            now = _decoded(self._tokenizer, self._ids)
            # Half a character decodes to the replacement character. Decoding starts one point earlier, because some
            # tokenizers drop the space at the beginning of a text.
            if len(now) > len(before) and not now.endswith("\ufffd"):
                self._text += now[len(before) :]
                del self._ids[: self._complete]
                self._complete = len(self._ids)
        return self._show()

    def end(self, text: str) -> str:
        """The rest of the complete text."""
        return text[self._shown :]

    def _show(self) -> str:
        if self._stopped:
            return ""
        end = _end(self._text, self._stops, self._keep_stop, self._shown)
        self._stopped = end is not None
        if end is None:
            end = len(self._text) - _pending(self._text, self._stops)
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)) if ids else ""


def _end(text: str, stops: Sequence[str], keep_stop: bool, start: int = 0) -> int | None:
    """Where the text ends: at the stop string that was complete first, because there the engine stopped."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    if not found:
        return None
    past, at = min(found)
    return past if keep_stop else at


def _pending(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a stop string."""
    longest = max(map(len, stops), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0
