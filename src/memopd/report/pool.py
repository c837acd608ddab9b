"""A pool of token ids: sequences that repeat each other are kept once, and a sequence says what it brings that is new.

The prompts of an episode repeat most of the calls before them, and the episodes of a run begin with the same
instructions. The page would otherwise contain every one of these copies, and a reader would read them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memopd.types import Ids

WINDOW = 8  # ids that must match before a longer match is looked for
LEAST = 2 * WINDOW  # ids of a match: shorter ones are chance, and to refer to them would save nothing


@dataclass(frozen=True, slots=True)
class Part:
    """Ids of a sequence that are side by side in the pool: 80 ids at 312 that were there before are

    Part(at=312, n=80, known=True)
    """

    at: int
    n: int
    known: bool  # whether the pool had them before the sequence was added


class Pool:
    """`ids` has no stretch of `LEAST` ids that an earlier sequence had brought already."""

    def __init__(self) -> None:
        self.ids: Ids = np.empty(0, np.int32)
        self._windows: dict[bytes, int] = {}  # where each stretch of `WINDOW` ids stands: every eighth is enough

    def add(self, ids: Ids) -> list[Part]:
        """The parts of a sequence, in order. What the pool does not have is appended to it."""
        parts: list[Part] = []
        new: list[Ids] = []
        done, end = 0, len(self.ids)

        def append(stop: int) -> None:
            nonlocal end
            if done < stop:
                new.append(ids[done:stop])
                parts.append(Part(end, stop - done, known=False))
                end += stop - done

        for start, n, at in self._matches(ids):
            append(start)
            if parts and parts[-1].known and parts[-1].at + parts[-1].n == at and done == start:
                parts[-1] = Part(parts[-1].at, parts[-1].n + n, known=True)
            else:
                parts.append(Part(at, n, known=True))
            done = start + n
        append(len(ids))
        self._append(new)
        return parts

    def _append(self, new: list[Ids]) -> None:
        first = len(self.ids) - len(self.ids) % WINDOW
        self.ids = np.concatenate([self.ids, *new])
        text = self.ids[first:].tobytes()
        for at in range(first, len(self.ids) - WINDOW + 1, WINDOW):
            self._windows.setdefault(text[4 * (at - first) : 4 * (at - first + WINDOW)], at)

    def _matches(self, ids: Ids) -> Iterator[tuple[int, int, int]]:
        """(start, n, at): ids[start : start + n] are in the pool at `at`. Matches do not overlap."""
        text = np.ascontiguousarray(ids, np.int32).tobytes()
        here = done = 0
        while here + WINDOW <= len(ids):
            at = self._windows.get(text[4 * here : 4 * (here + WINDOW)])
            if at is not None:
                back = _alike(ids[done:here][::-1], self.ids[:at][::-1])
                n = back + _alike(ids[here:], self.ids[at:])
                if n >= LEAST:
                    yield here - back, n, at - back
                    here = done = here - back + n
                    continue
            here += 1


def _alike(a: Ids, b: Ids) -> int:
    """The number of ids that two sequences have in common at their beginning."""
    most = min(len(a), len(b))
    done, step = 0, 64
    while done < most:
        differ = np.flatnonzero(a[done : done + step][: most - done] != b[done : done + step][: most - done])
        if len(differ):
            return done + int(differ[0])
        done, step = done + step, 2 * step
    return most
