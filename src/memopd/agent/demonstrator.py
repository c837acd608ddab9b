"""Demonstrations on real questions: a scripted policy that searches with keywords and notes only what it found.

The demonstrator is an engine whose completions are written, not sampled, so its episodes go through the same agent,
memory rule and index as everything else. It knows the gold passages and answers of a question, but writes only what an
agent could know at that point:

    first query    the keywords of the question
    next query     the name of a gold passage that is still missing, if the question, the notes or the results name it
    note           the answer; where it takes several gold passages, first the sentence of each that leads on
    answer         when all gold passages were found, and the answer is in them

Without gold passages, the first result that contains the answer counts as one. Some questions are not solved in this
way; `demonstrate` leaves them out and says how many.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from memopd.agent.agent import Agent
from memopd.agent.codec import codec_of
from memopd.agent.environment import Outcome
from memopd.agent.parts import build_parts
from memopd.agent.protocol import read_action
from memopd.config import TasksConfig
from memopd.engine.protocol import Completion, Request
from memopd.retrieval import Hit, Index, Passage, passages_of
from memopd.tasks import Question, Task
from memopd.tasks.files import group
from memopd.tasks.grading import normalise
from memopd.types import Episode, Sampling, StopReason

TRIES = 4  # searches for one question before the demonstrator gives up
GIVEN_UP = "unknown"
CLAUSE = 160  # characters: a note that is longer ends at the next comma
BATCH = 256  # episodes at once

NOT_FOUND = "no gold passage was found"
NOT_NAMED = "nothing named the next gold passage"
NOT_REACHED = "a gold passage that was named was not found"
NO_TURNS = "the turns ran out before all gold passages were found"
NOT_SAID = "the gold passages do not contain the answer"
NO_ROOM = "the context became longer than the limit before an answer"
NOT_GRADED = "the answer as the tokenizer writes it is not graded as correct"

# Words that say nothing about what a question is about.
_EMPTY_WORDS = """
a about after also am an and any are as at be been before being both but by can could did do does doing done during each
for from get had has have having he her hers him his how i if in into is it its itself like many may me might more most
much my name named of on one or other our out over same she should since so some such than that the their theirs them
then there these they this those through to too under until up us was we were what when where whether which while who
whom whose why will with would you your
"""
_EMPTY = frozenset(_EMPTY_WORDS.split())
_WORD = re.compile(r"[^\s?!,;:\"“”()\[\]]+")
# A sentence ends at a full stop, but not after an initial or a common abbreviation.
_END = re.compile(
    r"(?<=[\w)\"”][.!?])(?<!\b[A-Z]\.)(?<!\b(?:St|Dr|Mr|Ms|Jr|Sr|vs|No|Mt|Lt|Co)\.)(?<!\b(?:Mrs|Inc|Ltd|Col|Gen|Rev)\.)"
    r"\"?\s+(?=[\"“(]?[A-Z0-9])"
)
_COMMA = re.compile(r"[(),;]")
_PLAIN = {"yes", "no"}  # answers that are concluded, not read


def keywords(question: str) -> str:
    """The words of a question that say what it is about. Capitals within a sentence keep a word: it is in a name.

    >>> keywords("Who is the child of the director of film Devotion (1929 Film)?")
    'child director film Devotion 1929 Film'
    """
    words = [word.strip(".'’") for word in _WORD.findall(question)]
    kept = [w for i, w in enumerate(words) if w and (w.lower() not in _EMPTY or (i > 0 and w[0].isupper()))]
    return " ".join(kept or words)


def contains(text: str, phrase: str) -> bool:
    """Whether the words of a phrase occur in a text, after the normalisation of the grading."""
    words = normalise(phrase)
    return bool(words) and f" {words} " in f" {normalise(text)} "


def clause(passage: Passage, leads: Sequence[str]) -> str:
    """The first sentence of a passage that contains the first possible of `leads`, or else its first one.

    A long sentence is cut at commas to a part that contains the lead.

    >>> clause(Passage("1", "Kiss and Tell", "A comedy of 1945. It stars Shirley Temple."), ["Shirley Temple"])
    'Kiss and Tell: It stars Shirley Temple'
    """
    sentences = _END.split(" ".join(passage.text.split()))
    found = ((lead, sentence) for lead in leads for sentence in sentences if contains(sentence, lead))
    lead, sentence = next(found, ("", sentences[0]))
    part = _shortened(sentence, lead).rstrip(".,;: ")
    return part if not passage.title or contains(part, passage.title) else f"{passage.title}: {part}"


def _shortened(sentence: str, lead: str) -> str:
    if len(sentence) <= CLAUSE:
        return sentence
    cuts = [0, *_commas(sentence), len(sentence)]
    end = next(cut for cut in cuts[1:] if cut >= CLAUSE // 2 and (not lead or contains(sentence[:cut], lead)))
    starts = [cut for cut in cuts if cut < end and (not lead or contains(sentence[cut:end], lead))]
    start = 0 if end <= 3 * CLAUSE // 2 or not lead else starts[-1]
    return sentence[start:end].lstrip(",; ")


def _commas(sentence: str) -> Iterator[int]:
    """The places of commas and semicolons that are not inside parentheses."""
    depth = 0
    for mark in _COMMA.finditer(sentence):
        depth += {"(": 1, ")": -1}.get(mark[0], 0)
        if depth <= 0 and mark[0] in ",;" and sentence[mark.end() : mark.end() + 1] == " ":
            yield mark.start()


def name_of(passage: Passage) -> str:
    """A title without what distinguishes it from others in parentheses, which other texts do not repeat."""
    return re.sub(r"\s*\([^()]*\)$", "", " ".join(passage.title.split()))


@dataclass(slots=True)
class _Notes:
    """What the demonstrator knows in one episode."""

    task: Task
    answers: list[str] = field(default_factory=list)
    concluded: str = ""  # the sentences from which the last answer follows, if it was found in this turn
    # of the current question:
    found: dict[str, str] = field(default_factory=dict)  # the notes on its gold passages, by their ids
    queries: list[str] = field(default_factory=list)
    sent: str = ""  # the last query as it reached the index

    @property
    def question(self) -> Question | None:
        return self.task.questions[len(self.answers)] if len(self.answers) < self.task.k else None

    def answer(self, answer: str) -> None:
        self.answers.append(answer)
        self.concluded = ". ".join(self.found.values()) if len(self.found) > 1 else ""
        self.found, self.queries = {}, []


class Demonstrator:
    """Searches `index` through the environment, which must be built on `self` so that results are seen with their ids.

    `gold` has the gold passages by id. With `yes_no`, these two are answers as well, when all of several gold passages
    were found; the demonstrator does not derive them, it knows them. `failures` says why a question was not solved.
    """

    def __init__(self, index: Index, tokenizer: Any, gold: Mapping[str, Passage], yes_no: bool = False) -> None:
        self.index = index
        self.codec = codec_of(tokenizer)
        self.gold = gold
        self.yes_no = yes_no
        self.tasks: dict[str, Task] = {}
        self.failures: dict[str, str] = {}
        self._notes: dict[str, _Notes] = {}
        self._hits: dict[str, list[Hit]] = {}  # by query

    def begin(self, tasks: Iterable[Task]) -> None:
        """Take the tasks that are played next, and forget the others."""
        self.tasks = {task.id: task for task in tasks}
        self._notes, self._hits = {}, {}

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        found = self.index.search(queries, k)
        self._hits.update(zip(queries, found, strict=True))
        return found

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._completion(request) for request in requests]

    def _completion(self, request: Request) -> Completion:
        notes = self._notes.setdefault(request.episode, _Notes(self.tasks[request.episode]))
        if request.purpose:  # a call of the memory rule: the episode continues, and any true text will do
            return Completion(self.codec.encode(self._summary(notes)), None, StopReason.STOP)
        text = self._response(notes, self._hits.get(notes.sent, []), last="</search>" not in request.stop)
        ids = self.codec.encode(text)
        notes.sent = read_action(
            self.codec.decode(ids)
        ).text  # as the environment reads it: tokenizers change characters
        return Completion(ids, None, StopReason.STOP)

    def _response(self, notes: _Notes, hits: Sequence[Hit], last: bool) -> str:
        notes.concluded = ""
        if notes.queries:
            self._read(notes, hits)
        while (question := notes.question) is not None and not last:
            query = self._next_query(question, notes, hits)
            if query is not None:
                notes.queries.append(query)
                return f"<think>{self._summary(notes)}</think>\n<search>{query}</search>"
            notes.answer(GIVEN_UP)
        if question is not None:
            self._fail(question, notes, NO_TURNS)
        answers = notes.answers + [GIVEN_UP] * (notes.task.k - len(notes.answers))
        return f"<think>{self._summary(notes)}</think>\n<answer>{'; '.join(answers)}</answer>"

    def _summary(self, notes: _Notes) -> str:
        parts = [f"{n}: {answer.rstrip('.')}." for n, answer in enumerate(notes.answers, 1)]
        if notes.concluded:
            n, answer = len(parts), notes.answers[-1].rstrip(".")
            parts[-1] = f"{n}: {notes.concluded}. So {answer}."
        if notes.question is not None:
            n = len(notes.answers) + 1
            if notes.found:
                parts += [f"{n}: {'. '.join(notes.found.values())}."]
            elif len(notes.queries) > 1:
                parts += [f"{n}: not found yet."]
            parts += [f"Next {n}."]
        return " ".join(parts)

    def _read(self, notes: _Notes, hits: Sequence[Hit]) -> None:
        """Note what the results of the last search say about the current question."""
        question = notes.question
        assert question is not None
        gold = self._gold(question)
        passages = [hit.passage for hit in hits]
        if not gold:
            answer = next((a for p in passages for a in _answers(question) if _says(p, a)), None)
            if answer is not None and normalise(answer) not in _PLAIN:
                notes.answer(answer)
            return
        for passage in passages:
            if passage.id in gold and passage.id not in notes.found:
                missing = [name_of(p) for p in gold.values() if p.id not in notes.found and p.id != passage.id]
                read = [a for a in question.answers if normalise(a) not in _PLAIN]
                notes.found[passage.id] = clause(passage, [*read, *missing])
        if len(notes.found) < len(gold):
            return
        readable = "\n".join([*notes.found.values(), *(p.contents for p in passages if p.id in gold)])
        answer = next((a for a in _answers(question) if self._follows(a, readable, len(gold))), None)
        if answer is not None:
            notes.answer(answer)

    def _next_query(self, question: Question, notes: _Notes, hits: Sequence[Hit]) -> str | None:
        if not notes.queries:
            return keywords(question.text)
        gold = self._gold(question)
        if len(notes.found) == len(gold) or len(notes.queries) >= TRIES:
            self._fail(question, notes, NO_TURNS)
            return None
        seen = "\n".join([question.text, *notes.found.values(), *(hit.passage.contents for hit in hits)])
        names = [name_of(p) for p in gold.values() if p.id not in notes.found]
        named = [name for name in names if contains(seen, name)]
        more = [" ".join(dict.fromkeys(f"{name} {keywords(question.text)}".split())) for name in named]
        queries = [query for query in (*named, *more) if query not in notes.queries]
        if not queries:
            self._fail(question, notes, NOT_REACHED if named else NOT_NAMED)
        return queries[0] if queries else None

    def _fail(self, question: Question, notes: _Notes, otherwise: str) -> None:
        """Record why a question was not solved; `otherwise` if some but not all of its gold passages were found."""
        complete = len(notes.found) == len(self._gold(question))
        self.failures[question.id] = NOT_FOUND if not notes.found else NOT_SAID if complete else otherwise

    def _follows(self, answer: str, readable: str, passages: int) -> bool:
        """Whether the passages say the answer. No passage says yes or no, even if the word is in it."""
        if normalise(answer) in _PLAIN:
            return self.yes_no and passages > 1
        return contains(readable, answer)

    def _gold(self, question: Question) -> dict[str, Passage]:
        return {id: self.gold[id] for id in question.supporting if id in self.gold}


def _answers(question: Question) -> list[str]:
    """The aliases that can be given: a semicolon separates the answers of two questions."""
    return [answer for answer in question.answers if ";" not in answer]


def _says(passage: Passage, answer: str) -> bool:
    return contains(passage.title, answer) or contains(passage.text, answer)


# ---- episodes --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Made:
    """What was made of one data set."""

    questions: int = 0
    with_gold: int = 0  # the index has gold passages of these; the others are solved by their answers alone
    solved: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # why the others were not
    tasks: Counter[int] = field(default_factory=Counter)  # by k
    episodes: Counter[int] = field(default_factory=Counter)  # by k: the correct ones, which are kept
    calls: int = 0
    tokens: int = 0  # of the responses, which a model is to learn

    def as_dict(self) -> dict[str, Any]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in values}


def demonstrate(
    sets: Mapping[str, Sequence[Question]],
    horizons: Sequence[int],
    index: Index,
    tokenizer: Any,
    made: dict[str, Made],
    tasks: TasksConfig | None = None,
    seed: int = 0,
    yes_no: bool = False,
    progress: Callable[[str, Sequence[Any]], Iterable[Any]] = lambda _, items: items,
) -> Iterator[Episode]:
    """Yield the correct episodes on tasks of each k in `horizons`, and count them in `made`.

    Every question is first asked alone. The solved ones of a data set are shuffled by the seed and grouped into tasks.
    """
    tasks = tasks or TasksConfig(memory="mem1")
    wanted = dict.fromkeys(id for questions in sets.values() for q in questions for id in q.supporting)
    engine = Demonstrator(index, tokenizer, passages_of(index, wanted) if wanted else {}, yes_no)
    player = _Player(engine, tokenizer, tasks, seed)
    for source, questions in sets.items():
        of_set = made[source] = Made(len(questions))
        solved, alone = [], group(questions, 1, source)
        of_set.with_gold = sum(any(id in player.engine.gold for id in q.supporting) for q in questions)
        for task, episode in player.correct(progress(f"{source}, alone", _batches(alone))):
            solved.append(task.questions[0])
            if 1 in horizons:
                of_set.episodes[1] += 1
                yield _counted(episode, of_set)
        of_set.solved = len(solved)
        of_set.tasks[1] = len(alone) if 1 in horizons else 0
        of_set.failures.update(player.engine.failures[q.id] for q in _without(questions, solved))
        for k in (k for k in horizons if k > 1):
            random.Random(f"{seed}/{source}/{k}").shuffle(solved)
            together = group(solved, k, source)
            of_set.tasks[k] = len(together)
            for _, episode in player.correct(progress(f"{source}, {k} at once", _batches(together))):
                of_set.episodes[k] += 1
                yield _counted(episode, of_set)


@dataclass(slots=True)
class _Player:
    engine: Demonstrator
    tokenizer: Any
    tasks: TasksConfig
    seed: int

    def correct(self, batches: Iterable[Sequence[Task]]) -> Iterator[tuple[Task, Episode]]:
        """Play tasks, and yield the episodes in which every answer is right, in the order of the tasks."""
        environment, memory = build_parts(self.tasks, self.tokenizer, self.engine)
        if hasattr(memory, "query"):
            raise ValueError(f"--memory: {self.tasks.memory!r} changes the queries; demonstrate with another rule")
        limit = self.tasks.max_context
        agent = Agent(self.engine, environment, memory, self.tokenizer, Sampling(), BATCH, limit, self.tasks.memory)
        for batch in batches:
            self.engine.begin(batch)
            played = {episode.id: (episode, outcome) for episode, outcome in agent.graded(batch, self.seed)}
            for task in batch:
                episode, outcome = played[task.id]
                if _is_correct(task, outcome):
                    yield task, episode
                    continue
                for question in task.questions:  # the engine knows its own reasons, and not why it was not asked again
                    self.engine.failures.setdefault(question.id, NOT_GRADED if outcome.valid else NO_ROOM)


def _is_correct(task: Task, outcome: Outcome) -> bool:
    return outcome.em == task.k


def _batches(tasks: Sequence[Task]) -> list[Sequence[Task]]:
    return [tasks[at : at + BATCH] for at in range(0, len(tasks), BATCH)]


def _without(questions: Iterable[Question], solved: Iterable[Question]) -> list[Question]:
    ids = {q.id for q in solved}
    return [q for q in questions if q.id not in ids]


def _counted(episode: Episode, made: Made) -> Episode:
    made.calls += len(episode.calls)
    made.tokens += sum(len(call.completion) for call in episode.calls)
    return episode
