"""Finds stop strings in the text of a completion, without changing its ids.

Text is compared as bytes, token by token. A byte-level tokenizer may split one character over several tokens, and a
stop string may begin in one token and end inside another; in bytes neither needs special treatment. UTF-8 is
self-synchronising, so a match in bytes is a match in text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any


class Stops:
    """The stop strings of a request. The token in which one ends is the last one, and is kept whole.

    >>> stops = Stops(("</a>",), [b"x", b"</", b"a>!", b">"])
    >>> stops.end([0, 1, 2]), stops.end([0, 1]), stops.end([1, 0, 2])
    (True, False, False)
    """

    def __init__(self, strings: tuple[str, ...], vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = vocabulary
        self.strings = [s.encode() for s in strings]
        self.reach = max(map(len, self.strings), default=1) - 1  # bytes before a token that can be part of a match
        # Only a token that contains a stop string, or starts with the end of one, can complete it. Most tokens cannot.
        ends = tuple({s[i:] for s in self.strings for i in range(len(s))})
        self.candidates = frozenset(
            i for i, text in enumerate(vocabulary) if text.startswith(ends) or any(s in text for s in self.strings)
        )

    def end(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string ends inside the last of these tokens."""
        if tokens[-1] not in self.candidates:
            return False
        before = b""
        for token in reversed(tokens[:-1]):
            if len(before) >= self.reach:
                break
            before = self.vocabulary[token] + before
        last = self.vocabulary[tokens[-1]]
        # A match must end inside `last`: one that ends in `before` would have ended the completion earlier.
        return any(s in before[len(before) - min(len(before), len(s) - 1) :] + last for s in self.strings)


def stops_of(tokenizer: Any, size: int) -> Any:
    """A function from strings to Stops, for a vocabulary of `size` ids. It prepares the same strings only once."""
    vocabulary = vocabulary_bytes(tokenizer, size)
    return lru_cache(maxsize=64)(lambda strings: Stops(strings, vocabulary))


def vocabulary_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """The bytes that every id adds to the text. Ids that the tokenizer does not know add none."""
    added = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    kind = _decoders(tokenizer)
    texts = []
    for i, token in enumerate(tokens):
        if i in added:
            texts.append(added[i])
        elif token is None:
            texts.append(b"")
        elif "ByteLevel" in kind:
            texts.append(b"".join(_BYTES.get(c) or c.encode() for c in token))
        elif kind & {"ByteFallback", "Metaspace"}:
            byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
            texts.append(bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode())
        else:
            texts.append(tokenizer.decode([i]).encode())
    return texts + [b""] * (size - len(texts))


def _decoders(tokenizer: Any) -> set[str]:
    """The kinds of decoder that a fast tokenizer chains; empty for a tokenizer in plain Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    if decoder is None:
        return set()
    return {part["type"] for part in decoder.get("decoders", [decoder])}


def _byte_alphabet() -> dict[str, bytes]:
    """From the printable characters in which byte-level vocabularies write bytes, back to the bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): bytes([b]) for b in printable} | {chr(256 + i): bytes([b]) for i, b in enumerate(others)}


_BYTES = _byte_alphabet()
