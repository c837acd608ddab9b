"""Constrained decoding: which tokens may follow, so that the text of a completion follows a grammar.

Grammars are in llguidance's dialect of Lark, which contains JSON schemas (`%json {...}`). A special token is written
by its name (`<tool_call>`). The log-probabilities of such a completion belong to the restricted distribution, so
training cannot use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Guide:
    """The state of one completion in its grammar."""

    def __init__(self, matcher: Any, width: int) -> None:
        self._matcher, self._width = matcher, width

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each id may be sampled next: [V]. At the grammar's end only the ids that end a completion may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._width, bitorder="little").astype(bool)

    def take(self, token: int) -> None:
        """Go on after a sampled token. An error of `allowed` is raised here, where it ends this completion alone."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            reason = " ".join(str(self._matcher.get_error()).split())[:200]
            raise ValueError(f"the grammar cannot be followed: {reason}")


def guides_of(tokenizer: Any, width: int, ends: Iterable[int]) -> Callable[[str], Guide]:
    """A function from a grammar to a Guide, for a vocabulary of `width` ids. It may be called from any thread.

    The tables of the tokenizer are made for the first grammar, which takes a second or two for a large vocabulary.
    """
    lock = threading.Lock()
    prepared: list[Any] = []

    def guide(grammar: str) -> Guide:
        try:
            import llguidance
            import llguidance.hf
        except ImportError:
            raise ValueError("constrained decoding needs llguidance: pip install llguidance") from None
        with lock:
            if not prepared:
                if getattr(tokenizer, "backend_tokenizer", None) is None:
                    raise ValueError("constrained decoding needs a fast tokenizer (tokenizer.json)")
                prepared.append(llguidance.hf.from_tokenizer(tokenizer, n_vocab=width, eos_token=sorted(ends)))
        matcher = llguidance.LLMatcher(prepared[0], grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar is not supported: {' '.join(matcher.get_error().split())[:200]}")
        return Guide(matcher, width)

    return guide
