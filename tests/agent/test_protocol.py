"""What a response means, for every way to get it wrong."""

import pytest

from memopd.agent.protocol import (
    MAX_QUERY,
    Action,
    Kind,
    documents_of,
    hint,
    information,
    read_action,
    read_prompt,
    summary_of,
    user_message,
)
from memopd.tasks import Question, Task

SEARCH, ANSWER, NONE = Kind.SEARCH, Kind.ANSWER, Kind.NONE


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ("<think>a</think><search>river Vel</search>", Action(SEARCH, "river Vel")),
        ("<think>a</think>\n<answer>x; y</answer>", Action(ANSWER, "x; y")),
        ("no tag at all", Action(NONE)),
        ("", Action(NONE)),
        ("<search>unclosed", Action(NONE)),
        ("closed only</search>", Action(NONE)),
        ("</search><search>wrong way round", Action(NONE)),
        ("<search></search>", Action(SEARCH, "")),
        ("<search>  \n </search>", Action(SEARCH, "")),
        ("<search>one</search><search>two</search>", Action(SEARCH, "one")),
        ("<search>outer<search>inner</search></search>", Action(SEARCH, "inner")),
        ("<answer>x</answer><search>q</search>", Action(SEARCH, "q")),  # a search is looked for first
        ("<answer>x</answer><answer>y</answer>", Action(ANSWER, "y")),  # the last answer counts
        ("<search>unclosed<answer>x</answer>", Action(ANSWER, "x")),
        ("<SEARCH>q</SEARCH>", Action(NONE)),
        ("<search>two\nlines\tand  spaces</search>", Action(SEARCH, "two lines and spaces")),
    ],
)
def test_action(response, action):
    assert read_action(response) == action


def test_on_the_last_turn_only_an_answer_counts():
    assert read_action("<search>q</search>", last=True) == Action(NONE)
    assert read_action("<search>q</search><answer>x</answer>", last=True) == Action(ANSWER, "x")


class Searched(str):
    """A text that counts the characters in which something was looked for."""

    characters = 0

    def find(self, what, start=0, end=None):
        Searched.characters += len(range(*slice(start, end).indices(len(self))))
        return super().find(what, start, end)

    def rfind(self, what, start=0, end=None):
        Searched.characters += len(range(*slice(start, end).indices(len(self))))
        return super().rfind(what, start, end)


@pytest.mark.parametrize("flood", ["<search>", "<search>a</search", "<answer>x;", "x"])
def test_a_flood_is_read_a_few_times_and_no_more(flood):
    """However many tags are left open: six searches at the most, where a search for every tag would be thousands."""
    text = flood * (100_000 // len(flood))
    for one, kind in ((text, NONE), (text + "</search>", SEARCH if "<search>" in flood else NONE)):
        Searched.characters = 0
        assert read_action(Searched(one)).kind is kind
        summary_of(Searched(one))
        assert len(one) <= Searched.characters <= 6 * len(one)


def test_a_query_is_cut():
    assert len(read_action(f"<search>{'a' * 10_000}</search>").text) == MAX_QUERY


def test_user_message_joins_questions():
    task = Task("t", (Question("0", "Who?", ("a",)), Question("1", " where ", ("b",)), Question("2", "what ?", ("c",))))
    assert user_message(task).endswith("\nQuestions: Who?; where?; what?")


def test_a_prompt_from_a_file(tmp_path):
    (tmp_path / "mine.txt").write_text("Élan. {questions}\n{other}\n")
    prompt = read_prompt(str(tmp_path / "mine.txt"))
    task = Task("t", (Question("0", "Who?", ("a",)), Question("1", "{questions}", ("b",))))
    assert user_message(task, prompt) == "Élan. Who?; {questions}?\n{other}\n"  # only the prompt has a place to fill


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read as text"),
        (b"\xff{questions}", "cannot be read as text"),
        (b"no place", r"must contain \{questions\} once, where the questions go; it does 0 times"),
        (b"{questions} {questions}", "it does 2 times"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_one_line(tmp_path, content, line):
    if content is not None:
        (tmp_path / "mine.txt").write_bytes(content)
    with pytest.raises(ValueError, match=f"^--prompt: '.*mine.txt' .*{line}"):
        read_prompt(str(tmp_path / "mine.txt"), "--prompt")


def test_information_and_back():
    documents = [("Vel (river)", "A river."), ("Dun", "A town (old) by the Vel.")]
    text = information(documents, turns_left=3)
    assert text == (
        "\n<information>\nYou have 3 turns left.\nDoc 1(Title: Vel (river)) A river.\n"
        "Doc 2(Title: Dun) A town (old) by the Vel.\n</information>\n"
    )
    assert documents_of("older <information>\nDoc 1(Title: X) y\n</information>" + text)[1] == documents[1]
    assert information([], 1) == "\n<information>\nThis is the last turn: answer now.\nNo results.\n</information>\n"
    assert documents_of("none") == documents_of(information([], 1)) == []
    several = [("Vel (river)", "A river.\nDoc 3(Title: no) text\n\nlong"), ("Dun", "Two\nlines")]
    assert documents_of(information(several, turns_left=3)) == several
    assert hint(1) == hint(0) != hint(2)


@pytest.mark.parametrize(
    ("response", "summary"),
    [
        ("<think> known: a </think><search>q</search>", "known: a"),
        ("plain words <search>q</search>", "plain words"),
        ("<think>unclosed <answer>x</answer>", "unclosed"),
        ("nothing else", "nothing else"),
    ],
)
def test_summary(response, summary):
    assert summary_of(response) == summary
