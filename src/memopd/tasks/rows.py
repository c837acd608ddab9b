"""What one row of a question set says, in the formats in which the sets are published.

    FlashRAG           id, question, golden_answers, metadata {type, supporting_ids}
    HotpotQA, 2Wiki    _id, question, answer, type, context [[title, [sentences]]], supporting_facts [[title, n]]
    MuSiQue            id, question, answer, answer_aliases, answerable,
                       paragraphs [{title, paragraph_text, is_supporting}]
    SQuAD              id, question, answers [{text}], title, context; nested under data and paragraphs in its own file
    NQ-open            question, answer [aliases]

The last four are also read with the columns that they have on the hub. Sets that bring their own passages do not name
them: a passage's id is then a digest of its title and text, the same in `Question.supporting` and in a corpus that
`memopd tasks passages` writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, TypeAlias
from urllib.parse import unquote

from memopd.tasks.task import Question

Row: TypeAlias = dict[str, Any]

_HOPS = re.compile(r"(\dhop)\d?_")  # MuSiQue's ids begin with the number of hops: 3hop1__...


def question_of(row: Row, number: int) -> Question | None:
    """The question of a row, or None if it has no answer on purpose. `number` is its id if it has no other."""
    row = _stated(row)
    if "golden_answers" in row or not {"answer", "answers"} & row.keys():
        if "golden_answers" not in row and {"context", "paragraphs"} & row.keys():
            raise ValueError("answer: missing; published test sets have none: use the train or dev set")
        return _flashrag(row)
    if row.get("answerable") is False or row.get("is_impossible") is True or _spans(row) == []:
        return None
    id = str(number) if row.get("id") is None and row.get("_id") is None else id_of(row)
    kind = row.get("type")
    if not isinstance(kind, str):
        hops = _HOPS.match(id)
        kind = hops[1] if hops and "paragraphs" in row else ""
    supporting = tuple(dict.fromkeys(passage_id(*passage) for passage, gold in _context(row) if gold))
    return Question(id, text_of(row, "question").strip(), _answers(row), kind, (), supporting)


def passages_in(row: Row) -> Iterator[tuple[str, str, str]]:
    """The id, title and text of each passage that comes with a question."""
    for (title, text), _ in _context(_stated(row)):
        yield passage_id(title, text), title, text


def passage_id(title: str, text: str) -> str:
    """
    >>> passage_id("Velm", "The Velm is a river.")
    '4883f6971f92b757'
    """
    return blake2b(f"{title}\n{text}".encode(errors="replace"), digest_size=8).hexdigest()


def squad_rows(articles: Any) -> Iterator[Row]:
    """The questions of SQuAD's nested file, each with its title and paragraph, as on the hub."""
    for article in _dicts(articles, "data"):
        for paragraph in _dicts(article.get("paragraphs"), "data.paragraphs"):
            for row in _dicts(paragraph.get("qas"), "data.paragraphs.qas"):
                yield {**row, "title": article.get("title", ""), "context": paragraph.get("context")}


def _stated(row: Row) -> Row:
    """A row without its nulls: in a table every row has every column, also those of other data sets."""
    return {name: value for name, value in row.items() if value is not None}


def _flashrag(row: Row) -> Question:
    metadata = row["metadata"] if isinstance(row.get("metadata"), dict) else {}
    kind = metadata.get("type")
    answers = aliases_of(given(row, "golden_answers"), "golden_answers")
    supporting = ids_of(metadata.get("supporting_ids"), "metadata.supporting_ids")
    return Question(
        id_of(row), text_of(row, "question"), answers, kind if isinstance(kind, str) else "", (), supporting
    )


def _answers(row: Row) -> tuple[str, ...]:
    if (spans := _spans(row)) is not None:
        return tuple(dict.fromkeys(aliases_of(spans, "answers")))
    if row.get("answer") is None:
        raise ValueError(f"answers: must be a list of strings, got {short(row['answers'])}")
    answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
    more = row.get("answer_aliases")
    name = "answer, answer_aliases" if more else "answer"
    return tuple(dict.fromkeys(aliases_of([*answers, *more] if isinstance(more, list) else answers, name)))


def _spans(row: Row) -> list[Any] | None:
    """The texts of SQuAD's answers: a list of spans in its file, or columns on the hub."""
    match row.get("answers"):
        case {"text": list(texts)}:
            return texts
        case list(spans):
            return [span.get("text") if isinstance(span, dict) else span for span in spans]
    return None


def _context(row: Row) -> Iterator[tuple[tuple[str, str], bool]]:
    """The (title, text) of each passage of a row, and whether it is a gold one."""
    if "paragraphs" in row:  # MuSiQue
        for paragraph in _dicts(row["paragraphs"], "paragraphs"):
            text = text_of(paragraph, "paragraph_text", "paragraphs")
            yield (text_of(paragraph, "title", "paragraphs"), text.strip()), paragraph.get("is_supporting") is True
    elif isinstance(row.get("context"), str):  # SQuAD
        yield (unquote(text_of(row, "title")).replace("_", " "), row["context"].strip()), True
    elif "context" in row:  # HotpotQA and 2WikiMultihopQA
        gold = {title for title, _ in _pairs(row.get("supporting_facts", []), "supporting_facts", "sent_id")}
        for title, sentences in _pairs(row["context"], "context", "sentences"):
            if not isinstance(title, str) or not isinstance(sentences, list):
                raise ValueError(f"context: must be a list of titles with sentences, got {short(row['context'])}")
            yield (title, joined(sentences)), title in gold


def joined(sentences: list[Any]) -> str:
    """The text of a passage that is given as its sentences."""
    return " ".join(str(sentence).strip() for sentence in sentences)


def _pairs(value: Any, name: str, second: str) -> list[tuple[Any, Any]]:
    """Pairs, which are lists of two in a file and two columns on the hub."""
    if isinstance(value, dict) and isinstance(value.get("title"), list) and isinstance(value.get(second), list):
        return list(zip(value["title"], value[second], strict=True))
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError(f"{name}: must be a list of pairs, got {short(value)}")
    return [(pair[0], pair[1]) for pair in value]


def _dicts(value: Any, name: str) -> list[Row]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name}: must be a list of objects, got {short(value)}")
    return value


# ---- fields ----------------------------------------------------------------------------------------------------------


def id_of(row: Row) -> str:
    name = "id" if row.get("_id") is None else "_id"
    return str(row[name]) if type(row.get(name)) is int else text_of(row, name)


def aliases_of(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(alias, str) for alias in value):
        raise ValueError(f"{name}: must be a list of strings, got {short(value)}")
    if not any(alias.strip() for alias in value):
        raise ValueError(f"{name}: must contain an answer, got {short(value)}")
    return tuple(encodable(alias, name) for alias in value)


def ids_of(value: Any, name: str) -> tuple[str, ...]:
    """Ids of passages, in their order and without repetition. A file need not have any."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(id, str | int) for id in value):
        raise ValueError(f"{name}: must be a list of passage ids, got {short(value)}")
    return tuple(dict.fromkeys(encodable(str(id), name) for id in value))


def given(row: Row, name: str, within: str = "") -> Any:
    """A value that a row, or the part of it that is named `within`, must have. A null is none."""
    if (value := row.get(name)) is None:
        has = ", ".join(str(column) for column, held in row.items() if held is not None) or "nothing"
        place, owner = (f"{within}: {name}", "it") if within else (name, "the row")
        raise ValueError(f"{place}: missing; {owner} has {has} (docs/tasks.md says what is read)")
    return value


def text_of(row: Row, name: str, within: str = "") -> str:
    value = given(row, name, within)
    place = f"{within}: {name}" if within else name
    if not isinstance(value, str):
        raise ValueError(f"{place}: must be a string, got {short(value)}")
    return encodable(value, place)


def encodable(text: str, name: str) -> str:
    """Reject half a surrogate pair, which JSON can contain but no text file can store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}: contains half of a surrogate pair, got {short(text)}") from None
    return text


def short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
