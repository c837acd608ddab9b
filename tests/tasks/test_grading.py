"""Hand-worked grades."""

import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopd.tasks import Question, Task
from memopd.tasks.grading import Grade, Score, answers_of, exact_match, f1, grade, normalise, reward_of


def questions(*aliases: tuple[str, ...]) -> tuple[Question, ...]:
    return tuple(Question(f"q{i}", "who?", a) for i, a in enumerate(aliases))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Velmora-Works, Inc.", "velmoraworks inc"),  # punctuation goes, it does not become a space
        ("a man, a plan, an idea, the canal", "man plan idea canal"),
        ("Another Theory", "another theory"),  # articles are words, not prefixes
        ("t.h.e", ""),  # punctuation first, then articles
        ("December\t14,\n1972", "december 14 1972"),
        ("O’Neal", "o’neal"),  # only ASCII punctuation, as in SQuAD's script
        ("ΑΘΉΝΑ", "αθήνα"),
        ("東京", "東京"),
        ("", ""),
    ],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


def test_one_text_in_two_encodings_is_one_text():
    composed, decomposed = "à la carte", unicodedata.normalize("NFD", "à la carte")
    assert composed != decomposed
    assert normalise(composed) == normalise(decomposed) == "à la carte"  # SQuAD's script: the a goes as an article
    assert exact_match(decomposed, (composed,)) == exact_match(decomposed, (composed,), "mem1") == 1


@given(st.text())
def test_normalise_does_not_care_about_encoding_case_or_spaces(text):
    assert normalise(unicodedata.normalize("NFD", text)) == normalise(unicodedata.normalize("NFC", text))
    assert normalise(f"  {text} ") == normalise(text)
    assert normalise(f"The {text}") == normalise(text)


def test_any_alias_is_right():
    aliases = ("14 December 1972 UTC", "December 1972")
    assert exact_match("december 1972", aliases) == 1
    assert exact_match("14 December 1972", aliases) == 0
    assert f1("14 December 1972", aliases) == pytest.approx(6 / 7)  # first: 3 of 3 and 4; second: 2 of 3 and 2 is .8
    assert f1("1972", aliases) == pytest.approx(2 / 3)  # second: 1 of 1 and 2; first: 1 of 1 and 4 is .4


def test_tokens_are_a_bag():
    assert f1("duran duran", ("Duran",)) == pytest.approx(2 / 3)
    assert f1("Duran", ("Duran Duran",)) == pytest.approx(2 / 3)
    assert f1("works velmora", ("Velmora Works",)) == 1  # in any order
    assert f1("Oskel", ("Velmora",)) == 0


def test_articles_count_under_mem1_alone():
    assert exact_match("The Beatles", ("Beatles",)) == 1
    assert exact_match("The Beatles", ("Beatles",), "mem1") == 0
    assert f1("The Beatles", ("Beatles",)) == 1
    assert f1("The Beatles", ("Beatles",), "mem1") == pytest.approx(2 / 3)


def test_mem1_has_sets_of_tokens():
    assert f1("duran duran", ("Duran",), "mem1") == 1
    assert exact_match("duran duran", ("Duran",), "mem1") == 0


def test_mem1_makes_punctuation_a_space():
    assert exact_match("Jean-Luc", ("Jean Luc",), "mem1") == 1
    assert exact_match("Jean-Luc", ("Jean Luc",)) == 0
    assert exact_match("USA", ("U.S.A.",)) == 1
    assert exact_match("USA", ("U.S.A.",), "mem1") == 0


@pytest.mark.parametrize("grading", ["squad", "mem1"])
def test_empty_answers_never_score(grading):
    for blank in ("", "  ", "\n"):
        for aliases in (("Oskel",), ("*",), ("The",), ("",)):  # NQ has an alias "*", which normalises to nothing
            assert exact_match(blank, aliases, grading) == f1(blank, aliases, grading) == 0


def test_aliases_that_normalise_to_nothing_are_compared_as_they_are():
    assert exact_match("the the", ("The The",)) == f1("the the", ("The The",)) == 1
    assert exact_match("A.", ("a",)) == 1  # a grade
    assert exact_match("the", ("A",)) == 0  # both are '' to SQuAD's script
    assert exact_match("*", ("*",)) == exact_match("*", ("*",), "mem1") == 1
    assert exact_match("?", ("*",)) == 0


def test_yes_and_no_are_words():
    assert exact_match("Yes.", ("yes",)) == 1
    assert exact_match("no", ("yes",)) == f1("no", ("yes",)) == 0
    assert f1("yes, both", ("yes",)) == pytest.approx(2 / 3)  # HotpotQA's own script gives 0; SQuAD's gives this


@given(st.text(), st.text(min_size=1), st.sampled_from(["squad", "mem1"]))
def test_f1_is_between_exact_match_and_one_and_symmetric(a, b, grading):
    assert exact_match(a, (b,), grading) <= f1(a, (b,), grading) <= 1
    assert f1(a, (b,), grading) == f1(b, (a,), grading)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<answer>Tarin Oskel; 1871</answer>", ("Tarin Oskel", "1871")),
        ("<think>so</think>\n<answer>\n a ;b\n</answer><|im_end|>", ("a", "b")),
        ("<answer>first</answer> no: <answer>second</answer>", ("second",)),
        ("<answer>closed</answer> <answer>open", ("closed",)),
        ("<answer>outer <answer>inner</answer>", ("inner",)),
        ("<answer>a</answer></answer>", ("a",)),
        ("<answer>a; b;</answer>", ("a", "b", "")),  # three, by the letter
        ("<answer></answer>", ("",)),
        ("<answer>open", None),
        ("</answer><answer>", None),
        ("closed</answer>", None),
        ("<Answer>a</Answer>", None),
        ("", None),
    ],
)
def test_the_last_closed_answer_is_split_on_semicolons(response, expected):
    assert answers_of(response) == expected


def test_ten_megabytes_are_read_in_one_go():
    assert answers_of("<answer>" * 1_250_000) is None
    assert answers_of("</answer>" * 1_250_000) is None
    assert answers_of("x" * 10_000_000 + "<answer>a</answer>") == ("a",)


def test_scores_are_summed_over_questions():
    asked = questions(("Tarin Oskel",), ("1871",), ("river Velm", "the Velm"))
    got = grade(asked, "<answer>Oskel; 1871; The Velm</answer>")
    assert got == Grade(
        em=2,
        f1=pytest.approx(2 + 2 / 3),
        answers=("Oskel", "1871", "The Velm"),
        per_question=(Score(0, pytest.approx(2 / 3)), Score(1, 1), Score(1, 1)),
    )
    assert got.valid
    assert grade(asked, "<answer>1871; Oskel; The Velm</answer>").em == 1  # the order counts
    assert grade(asked, "<answer>Oskel; 1871; The Velm</answer>", "mem1").em == 2
    assert grade(asked, "<answer>Oskel; 1871; A Velm</answer>", "mem1").em == 1


@pytest.mark.parametrize(
    "response",
    [
        "<answer>Tarin Oskel</answer>",  # too few
        "<answer>Tarin Oskel; 1871; 1872</answer>",  # too many
        "<answer>Tarin Oskel; 1871;</answer>",  # an empty one too many
        "<answer>Tarin Oskel; 1871",  # not closed
        "Tarin Oskel; 1871",
    ],
)
def test_an_unequal_number_of_answers_scores_nothing_at_all(response):
    got = grade(questions(("Tarin Oskel",), ("1871",)), response)
    assert (got.em, got.f1, got.per_question) == (0, 0, (Score(0, 0), Score(0, 0)))
    assert not got.valid


def test_an_empty_answer_costs_only_its_own_question():
    got = grade(questions(("Tarin Oskel",), ("1871",)), "<answer>; 1871</answer>")
    assert (got.em, got.f1, got.valid) == (1, 1, True)


def test_grading_is_squad_or_mem1():
    with pytest.raises(ValueError, match="grading must be squad or mem1, got 'exact'"):
        grade(questions(("a",)), "no answer", "exact")


TASK = Task("t", questions(("Tarin Oskel",), ("the 1871 works",)))


def test_rewards_by_name():
    responses = ["<answer>Tarin Oskel; 1871 works</answer>", "<answer>Oskel; 1871 works</answer>"]
    assert reward_of()(TASK, responses) == reward_of("em")(TASK, responses) == 1  # of the last response
    assert reward_of("f1")(TASK, responses) == pytest.approx(2 / 3 + 1)
    assert reward_of("em", "mem1")(TASK, responses) == 0
    assert reward_of("em")(TASK, []) == 0


@pytest.mark.parametrize(
    ("answer", "partial", "em"),
    [
        ("Oskel; 1871", 2, 2),
        ("Oskel", 1, 0),  # one of two is missing
        ("1871", 0, 0),  # answers are compared in order
        ("Oskel; 1871; 1872", 2, 0),  # one too many
        ("nobody; the 1871", 1, 1),  # articles go
        ("; ", 0, 0),
    ],
)
def test_partial_credit_by_hand(answer, partial, em):
    task = Task("t", questions(("Oskel",), ("1871",)))
    responses = ["<answer>Oskel; 1871</answer>", f"<answer>{answer}</answer>"]
    assert reward_of("em_partial")(task, responses) == partial
    assert reward_of("em_partial", "mem1")(task, responses) == partial  # it normalises as SQuAD under both gradings
    assert reward_of("em")(task, responses) == em
    assert reward_of("em_partial")(task, ["no answer"]) == reward_of("em_partial")(task, []) == 0


def test_rewards_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "their_rewards.py").write_text(
        "def count(task, responses): return len(responses) + task.k\n"
        "def broken(task, responses): return 'a lot'\n"
        "def infinite(task, responses): return float('inf')\n"
        "def one(task): return 1.0\n"
        "number = 3\n"
    )
    (tmp_path / "their_broken_rewards.py").write_text("import no_such_thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert reward_of("their_rewards:count")(TASK, ["a", "b", "c"]) == 5
    for name, message in {
        "their_rewards:broken": "'their_rewards:broken' must return a finite number, got 'a lot' for task 't'",
        "their_rewards:infinite": "must return a finite number, got inf",
    }.items():
        with pytest.raises(ValueError, match=message):
            reward_of(name)(TASK, ["a"])
    for name, message in {
        "their_rewards:sum": "module 'their_rewards' has no 'sum'",
        "their_rewards:number": "must be a function, got int",
        "their_rewards:one": r"must be a function of \(task, responses\)",
        "their_reward:count": "No module named 'their_reward'; put its folder in PYTHONPATH, or run from it",
        "their_broken_rewards:count": "No module named 'no_such_thing'",
        "their_rewards": "'their_rewards' is not one of em, f1, em_partial; write module:name for your own",
        "precision": "'precision' is not one of em, f1, em_partial; write module:name for your own",
    }.items():
        with pytest.raises(ValueError, match=message):
            reward_of(name)
    sys.modules.pop("their_rewards")
