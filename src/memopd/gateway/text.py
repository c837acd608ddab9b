"""The text of sampled ids that a client sees: up to the stop string, whole or as it comes. The ids stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memopd.types import Ids


def visible_text(tokenizer: Any, ids: Ids, stops: Sequence[str], keep_stop: bool = False) -> str:
    """The text without special tokens, up to the stop string, or past it with `keep_stop`."""
    text = _decoded(tokenizer, ids.tolist())
    end = _end(text, stops, keep_stop)
    return text if end is None else text[:end]


class StreamedText:
    """Text from ids as they come. It gives out no text that a later id could still change."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], keep_stop: bool = False) -> None:
        self._tokenizer, self._stops, self._keep_stop = tokenizer, stops, keep_stop
        self._ids: list[int] = []  # from the last but one place at which the text was whole
        self._whole = 0  # ids before the last such place
        self._text = ""
        self._shown = 0
        self._stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids make certain."""
        for id in ids:
            self._ids.append(id)
            before = _decoded(self._tokenizer, self._ids[: self._whole])
            now = _decoded(self._tokenizer, self._ids)
            # Half a character decodes to the replacement character; decoding from an earlier place keeps the spaces
            # that some tokenizers drop at the beginning of a text.
            if len(now) > len(before) and not now.endswith("\ufffd"):
                self._text += now[len(before) :]
                del self._ids[: self._whole]
                self._whole = len(self._ids)
        return self._show()

    def end(self, text: str) -> str:
        """The rest, given all of the text."""
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
    """Where the text ends: at the stop string that is complete first, as the engine sees them come."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    if not found:
        return None
    past, at = min(found)
    return past if keep_stop else at


def _pending(text: str, stops: Sequence[str]) -> int:
    """How much of the end may be the beginning of a stop string."""
    longest = max(map(len, stops), default=0)
    for n in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-n:]) for stop in stops):
            return n
    return 0
