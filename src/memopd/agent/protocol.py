"""MEM1's interaction in text: the agent's instructions, the actions in its responses, and its observations.

The tags, their order and the memory are MEM1's. The wording of the instructions and of the hint is our own; a user
names other instructions by `tasks.prompt`.

q      chat template of: instructions, then the questions joined by "; "
a_t    <think> summary </think> <search> keywords </search>      or      ... <answer> a1; a2 </answer>
o_t    <information>  the number of turns left, then the documents  </information>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from memopd.tasks import Task

QUESTIONS = "{questions}"  # its place in a prompt
INSTRUCTIONS = """\
Answer the questions below by reasoning, summarising and searching. At each step you see the questions, your own last \
summary, your last query and what it found. Nothing older is kept. First rewrite inside <think> and </think> a short \
summary that carries everything you still need: what is known for each question and what is missing. Then do one of \
two things. Search for one question with a few keywords inside <search> and </search>; the results come back inside \
<information> and </information>. Or, when all questions are answered, give the short answers in order inside <answer> \
and </answer>, separated by semicolons, such as <answer>first; second</answer>.
Questions: """

STOPS = ("</search>", "</answer>")
LAST_STOPS = ("</answer>",)  # after the last turn the agent could not read the results of a search
MAX_QUERY = 512  # characters: a runaway response is not a query


class Kind(StrEnum):
    SEARCH = "search"
    ANSWER = "answer"
    NONE = "none"  # neither tag is closed: the episode ends without an answer


@dataclass(frozen=True, slots=True)
class Action:
    kind: Kind
    text: str = ""  # the query, or the answers as written


def user_message(task: Task, prompt: str = INSTRUCTIONS + QUESTIONS) -> str:
    """The one user turn of a task: the prompt, with the task's questions in their place.

    >>> from memopd.tasks import Question
    >>> user_message(Task("t", (Question("0", "Who?", ("a",)), Question("1", "where", ("b",))))).splitlines()[-1]
    'Questions: Who?; where?'
    """
    questions = "; ".join(f"{q.text.strip().rstrip('?').rstrip()}?" for q in task.questions)
    return prompt.replace(QUESTIONS, questions)


def read_prompt(file: str, setting: str = "tasks.prompt") -> str:
    """The text of a prompt file. The questions have one place in it."""
    try:
        prompt = Path(file).expanduser().read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{setting}: {file!r} cannot be read as text ({error})") from None
    if prompt.count(QUESTIONS) != 1:
        raise ValueError(
            f"{setting}: {file!r} must contain {QUESTIONS} once, where the questions go; it does "
            f"{prompt.count(QUESTIONS)} times"
        )
    return prompt


def read_action(response: str, last: bool = False) -> Action:
    """The action in a response: the first closed <search>, or else the last closed <answer>. On the last turn only an
    answer counts. Of nested tags we take the innermost: the last opening tag before the first closing one."""
    if not last and (query := _first(response, "search")) is not None:
        return Action(Kind.SEARCH, " ".join(query[:MAX_QUERY].split()))
    if (answer := _last(response, "answer")) is not None:
        return Action(Kind.ANSWER, answer)
    return Action(Kind.NONE)


def summary_of(response: str) -> str:
    """The summary part of a response: its <think> text, or the text before the action if that tag is missing."""
    thought = _first(response, "think")
    if thought is None:
        cuts = [at for at in (response.find("<search>"), response.find("<answer>")) if at >= 0]
        thought = response[: min(cuts)] if cuts else response
        thought = thought.replace("<think>", "")
    return thought.strip()


def information(documents: Iterable[tuple[str, str]], turns_left: int) -> str:
    """o_t: the hint about the turns left, then every (title, text)."""
    lines = [f"Doc {i}(Title: {title}) {text}" for i, (title, text) in enumerate(documents, 1)]
    body = "\n".join([hint(turns_left), *(lines or ["No results."])])
    return f"\n<information>\n{body}\n</information>\n"


def hint(turns_left: int) -> str:
    if turns_left <= 1:
        return "This is the last turn: answer now."
    return f"You have {turns_left} turns left."


def documents_of(text: str) -> Sequence[tuple[str, str]]:
    """The (title, text) pairs of the last information block in a context, which the agent can read now."""
    start = text.rfind("<information>")
    block = text[start:].partition("</information>")[0] if start >= 0 else ""
    found: list[tuple[str, str]] = []
    _, begins, rest = block.partition("\nDoc 1(Title: ")
    while begins:  # a text may have several lines, so a document ends where the next number begins
        document, begins, rest = rest.partition(f"\nDoc {len(found) + 2}(Title: ")
        title, _, body = document.removesuffix("\n").partition(") ")
        found.append((title, body))
    return found


def _first(text: str, tag: str) -> str | None:
    """The text in the first closed tag. Its time is linear in the text, even with many open tags."""
    stop = text.find(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, stop) if stop >= 0 else -1
    return text[start + len(tag) + 2 : stop] if start >= 0 else None


def _last(text: str, tag: str) -> str | None:
    stop = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, stop) if stop >= 0 else -1
    return text[start + len(tag) + 2 : text.find(f"</{tag}>", start)] if start >= 0 else None
