"""Finds stop strings in the text of a completion, without changing its ids.

Text is compared as bytes, token by token. A byte-level tokenizer may split one character over several tokens, and a
stop string may begin in one token and end inside another; in bytes neither needs special treatment. UTF-8 is
self-synchronising, so a match in bytes is a match in text.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

FOUND = -1  # in place of a state: a stop string has ended


class Stops:
    """The stop strings of a request. The token in which one ends is the last one, and is kept whole.

    An Aho-Corasick automaton reads the bytes of the completion. Its state is the longest beginning of a stop string
    with which the text so far ends, so a sequence keeps one number, and a token costs its own bytes and nothing else.

    >>> stops = Stops(("</a>",), [b"x", b"</", b"a>!", b">"])
    >>> stops.after(stops.after(0, 1), 2) == FOUND
    True
    >>> stops.end([0, 1, 2]), stops.end([0, 1]), stops.end([1, 0, 2])
    (True, False, False)
    """

    def __init__(self, strings: tuple[str, ...], vocabulary: Sequence[bytes]) -> None:
        self.vocabulary = vocabulary
        self._next: list[dict[int, int]] = [{}]  # the state after one more byte of a stop string
        for string in strings:
            self._add(string.encode())
        self._shorter = self._failures()

    @property
    def states(self) -> int:
        """One for every beginning of a stop string: at most one more than the stop strings have bytes."""
        return len(self._next)

    def after(self, state: int, token: int) -> int:
        """The state after one more token, or FOUND if a stop string ends inside it. The first state is 0."""
        for byte in self.vocabulary[token]:
            while (following := self._next[state].get(byte)) is None and state:
                state = self._shorter[state]
            if following == FOUND:
                return FOUND
            state = following or 0
        return state

    def end(self, tokens: Sequence[int]) -> bool:
        """Whether a stop string ends inside the last of these tokens. None may have ended before it."""
        return reduce(self.after, tokens, 0) == FOUND

    def _add(self, string: bytes) -> None:
        state = 0
        for byte in string[:-1]:
            following = self._next[state].get(byte)
            if following == FOUND:  # a shorter stop string ends here, so this one is never reached
                return
            if following is None:
                following = self._next[state][byte] = len(self._next)
                self._next.append({})
            state = following
        self._next[state][string[-1]] = FOUND

    def _failures(self) -> list[int]:
        """For every state, the longest other beginning of a stop string with which its text ends."""
        shorter = [0] * len(self._next)
        states = deque([0])  # in the order of their length
        while states:
            state = states.popleft()
            for byte, following in self._next[state].items():
                if following == FOUND:
                    continue
                if state:
                    at = shorter[state]
                    while (known := self._next[at].get(byte)) is None and at:
                        at = shorter[at]
                    if known == FOUND:  # a stop string ends here that began later
                        self._next[state][byte] = FOUND
                        continue
                    shorter[following] = known or 0
                states.append(following)
        return shorter


def stops_of(tokenizer: Any, size: int) -> Any:
    """A function from strings to Stops, for a vocabulary of `size` ids. It builds each automaton once.

    It keeps few automata, because the longest stop strings that a request may have take megabytes.
    """
    vocabulary = vocabulary_bytes(tokenizer, size)
    return lru_cache(maxsize=16)(lambda strings: Stops(strings, vocabulary))


def vocabulary_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """The bytes that every id adds to the text. Ids that the tokenizer does not know add none."""
    added = {i: token.content.encode() for i, token in tokenizer.added_tokens_decoder.items()}
    known = 1 + max(tokenizer.get_vocab().values(), default=-1)  # not its length: some leave out ids
    tokens = tokenizer.convert_ids_to_tokens(list(range(min(size, known))))
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
