"""A-MEM (Xu et al., 2025, arXiv 2502.12110): notes that the model writes, links and revises, found again by embedding.

When turn t has been observed, turn t - 1 is about to leave the context. Before that happens:

    note      a model call writes a note of turn t - 1: content, keywords, tags and context
    evolve    a model call sees that note and the `size` nearest earlier ones. It links notes, and may revise tags and
              contexts
    x_{t+1}   the notes that are nearest to turn t, those linked to them, then turn t as under `mem1`

Both calls are an `Ask`: they are recorded and trained like the agent's actions. There is no state besides the replies.
All notes are read again from the turns at each update, so that a repeated episode is the same.

A small model does not always keep to the form. A reply without a content is a note that is all content, and a line of
`evolve` that cannot be read changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from memopd.agent.codec import Codec, prefix_of
from memopd.agent.memory import Ask, Mem1, Piece, Reply, Turn, Update

Embed: TypeAlias = Callable[[Sequence[str]], NDArray[Any]]  # from texts to rows of length 1

NOTE_TOKENS = 128
EVOLVE_TOKENS = 192
_WORDS = 8  # keywords, or tags, of a note
_VECTORS = 8192  # kept, because the notes of an episode are compared again at every turn

NOTE = """\
{step}
Above is one step of a search. Write a note of it, in exactly four lines that begin with "Content:", "Keywords:", \
"Tags:" and "Context:". The content gives the facts that answer the search, with names and numbers. The keywords are \
words to find the note by, the tags are one or two topics, and the context says what the facts are good for."""

EVOLVE = """\
{notes}

Note {new} is new. Which of the older notes belong with it? Write one line with their numbers, such as "Links: 1". \
Then, only for a note that should change now, write its new tags or its new context in a line that begins with \
"Note 1 tags:" or "Note 1 context:"."""


@dataclass(frozen=True, slots=True)
class Note:
    """A note, whose number is its place among the notes of the episode, from 1.

    >>> Note("The Velm is 90 km long.", 1, ("Velm", "length"), ("river",)).line(2)
    'Note 2: The Velm is 90 km long. Keywords: Velm, length. Tags: river.'
    """

    content: str
    call: int  # that wrote it
    keywords: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    context: str = ""
    links: frozenset[int] = frozenset()  # the places of notes, from 0

    @property
    def text(self) -> str:
        """The embedded text: all fields, as in the paper's equation 3."""
        return " ".join([self.content, *self.keywords, *self.tags, self.context]).strip()

    def line(self, number: int) -> str:
        lists = (("Keywords", ", ".join(self.keywords)), ("Tags", ", ".join(self.tags)), ("Context", self.context))
        return " ".join([f"Note {number}: {self.content}", *(f"{k}: {v.rstrip('.')}." for k, v in lists if v)])


class AMem:
    """The notes nearest to the last turn, those linked to them, the whole last response, then the new observation.

    At most `size` notes are nearest, and at most `size` more are linked. Notes that do not fit into the context are
    left out, beginning with the least near. `embedder` is a sentence-transformers model, or a function.
    """

    def __init__(self, codec: Codec, tokenizer: Any, size: int, embedder: str | Embed) -> None:
        self.codec, self.tokenizer, self.size = codec, tokenizer, size
        embed = _load(embedder) if isinstance(embedder, str) else embedder
        # A text is embedded alone: in a batch, padding would change its vector by what happens to be beside it.
        self._vector = lru_cache(_VECTORS)(lambda text: np.asarray(embed([text])[0], np.float64))

    def context(self, turns: Sequence[Turn]) -> Update:
        notes, room = self.notes(turns[:-1]), turns[-1].room
        if len(turns) > 1 and (prompt := self._note_prompt(turns[-2], room)):
            written = yield Ask(prompt, "note", max_tokens=NOTE_TOKENS)
            new, evolved = read_note(written), None
            if new and (shown := self._shown(notes, new, room)):
                evolved = yield Ask(_evolve_prompt(notes, new, shown), "evolve", max_tokens=EVOLVE_TOKENS)
            notes = self._added(notes, written, evolved, room)
        return self._pieces(notes, turns)

    def notes(self, turns: Iterable[Turn]) -> list[Note]:
        """All notes as they are after these turns."""
        notes: list[Note] = []
        for turn in turns:
            replies = {reply.purpose: reply for reply in turn.replies}
            if "note" in replies:
                notes = self._added(notes, replies["note"], replies.get("evolve"), turn.room)
        return notes

    def related(self, notes: Sequence[Note], text: str) -> list[int]:
        """The places of the notes nearest to a text, then of those linked to them; both from near to far."""
        order = self._nearest(notes, text)
        near = order[: self.size]
        linked = [place for place in order[self.size :] if any(place in notes[n].links for n in near)]
        return [*near, *linked[: self.size]]

    def _nearest(self, notes: Sequence[Note], text: str) -> list[int]:
        # Rounded, so that equal notes tie on every machine. The newer one is then the nearer.
        scores = [round(float(self._vector(note.text) @ self._vector(text)), 6) for note in notes]
        return sorted(range(len(notes)), key=lambda place: (-scores[place], -place))

    def _added(self, notes: list[Note], written: Reply, evolved: Reply | None, room: int | None) -> list[Note]:
        """The notes after the replies of one update."""
        new = read_note(written)
        if new is None:
            return notes
        if evolved is None:
            return [*notes, new]
        return evolve([*notes, new], self._shown(notes, new, room), evolved.text)

    def _shown(self, notes: Sequence[Note], new: Note, room: int | None) -> list[int]:
        """The places of the notes that `evolve` shows: the nearest to the new one, as many as fit."""
        shown = self._nearest(notes, new.text)[: self.size]
        while shown and not self._fits(_evolve_prompt(notes, new, shown), room):
            shown.pop()
        return shown

    def _note_prompt(self, turn: Turn, room: int | None) -> str | None:
        """Asks for a note of a turn, of which as much is shown as fits. None if not even the request fits."""
        step = self.codec.encode(self.codec.decode(turn.response) + self.codec.decode(turn.observation))
        size = len(step)
        while True:
            prompt = NOTE.format(step=self.codec.decode(step[:size]))
            over = 0 if room is None else len(prefix_of(self.tokenizer, prompt)) - room
            if over <= 0:
                return prompt
            if size == 0:
                return None
            size = max(0, size - over)

    def _fits(self, prompt: str, room: int | None) -> bool:
        # The prompt does not follow q, so that it could be longer by |q|. One limit for all prompts is simpler.
        return room is None or len(prefix_of(self.tokenizer, prompt)) <= room

    def _pieces(self, notes: Sequence[Note], turns: Sequence[Turn]) -> list[Piece]:
        last = Mem1().context(turns)
        query = "".join(self.codec.decode(piece.ids) for piece in last)
        places, room = self.related(notes, query), turns[-1].room
        while places:
            pieces = [self._piece(notes, places, i) for i in range(len(places))] + last
            if room is None or sum(len(piece.ids) for piece in pieces) <= room:
                return pieces
            places.pop()
        return last

    def _piece(self, notes: Sequence[Note], places: Sequence[int], i: int) -> Piece:
        note = notes[places[i]]
        begin, end = "<notes>\n" if i == 0 else "", "</notes>\n" if i == len(places) - 1 else ""
        return Piece(self.codec.encode(f"{begin}{note.line(places[i] + 1)}\n{end}"), "memory", note.call)


# ---- what a model wrote ----------------------------------------------------------------------------------------------

# Names of fields at the beginning of a line or of a JSON entry, in any case, in quotes or stars or not. All repetitions
# are bounded, so that no text takes long to read.
_FIELD = re.compile(r"(?im)(?:^|[{,;|])[^\w\n]{0,8}(content|keywords|tags|context)\b[^\w\n:]{0,4}:")
_LINKS = re.compile(r"(?i)\W{0,8}links?\b[^\d\n:]{0,20}:(.*)")
_NUMBERED = re.compile(r"(?i)\W{0,8}note\W{0,3}(\d{1,4})\b\W{0,4}(.*)")
_CHANGE = re.compile(r"(?i)\W{0,8}(?:new\s|updated\s)?(tags|context)\b[^\w\n:]{0,4}:(.*)")
_EDGES = " \t\n\r\"'`*_#[]{}<>,;|-"


def read_note(reply: Reply) -> Note | None:
    """The note in a reply. A reply without a content is content as a whole; an empty one is no note."""
    _, *fields = _FIELD.split(reply.text)
    found: dict[str, str] = {}
    for name, value in zip(fields[::2], fields[1::2], strict=True):
        found.setdefault(name.lower(), value)  # a model that goes on after its note begins another one
    if content := _plain(found.get("content", "")):
        words = _listed(found.get("keywords", "")), _listed(found.get("tags", ""))
        return Note(content, reply.call, *words, _plain(found.get("context", "")))
    raw = " ".join(reply.text.split())
    return Note(raw, reply.call) if raw else None


def evolve(notes: Sequence[Note], shown: Sequence[int], text: str) -> list[Note]:
    """The notes after a reply to `EVOLVE`. The last note is the new one. Others than it and those `shown` stay."""
    evolved, new = list(notes), len(notes) - 1
    places = {str(place + 1): place for place in (*shown, new)}
    current = None
    for line in text.splitlines():
        if links := _LINKS.match(line):
            for place in {places[n] for n in re.findall(r"\d+", links[1]) if n in places} - {new}:
                for one, other in ((place, new), (new, place)):
                    evolved[one] = replace(evolved[one], links=evolved[one].links | {other})
            continue
        if numbered := _NUMBERED.match(line):
            current, line = places.get(numbered[1]), numbered[2]
        if current is not None and (change := _CHANGE.match(line)) and (value := _plain(change[2])):
            note = evolved[current]
            is_tags = change[1].lower() == "tags"
            evolved[current] = replace(note, tags=_listed(value)) if is_tags else replace(note, context=value)
    return evolved


def _plain(value: str) -> str:
    """One line, without the marks of JSON or Markdown around it."""
    return " ".join(value.split()).strip(_EDGES)


def _listed(value: str) -> tuple[str, ...]:
    words = (_plain(word).rstrip(".") for word in re.split(r"[,;|\n]", value))
    return tuple(dict.fromkeys(word for word in words if word))[:_WORDS]


def _evolve_prompt(notes: Sequence[Note], new: Note, shown: Sequence[int]) -> str:
    number = len(notes) + 1
    lines = [*(notes[place].line(place + 1) for place in sorted(shown)), new.line(number)]
    return EVOLVE.format(new=number, notes="\n".join(lines))


def _load(model: str) -> Embed:
    from memopd.retrieval.dense import embedder

    return embedder(model)
