"""The search environment: one retrieval request a step, turns that grow with k, every malformed response."""

import pytest

from memopd.agent.environment import Progress, SearchEnvironment, turns_for
from memopd.agent.protocol import LAST_STOPS, STOPS
from memopd.retrieval import Hit, Passage
from memopd.tasks import Question, Task

ONE = Task("t1", (Question("0", "Who?", ("Ann", "Anna")),))
TWO = Task("t2", (Question("0", "Who?", ("Ann",)), Question("1", "Where?", ("Vel",))))


class Index:
    """Finds a passage that names the query; counts how often it was asked."""

    def __init__(self):
        self.asked = []

    def search(self, queries, k):
        self.asked.append(list(queries))
        return [[Hit(Passage(str(i), f"About {q}", "text"), 1.0) for i in range(k)] for q in queries]


@pytest.mark.parametrize(("k", "turns"), [(1, 4), (2, 6), (8, 18), (16, 34)])
def test_turns_grow_with_k(k, turns):
    assert turns_for(k) == turns


def test_one_request_serves_all_live_episodes():
    index = Index()
    live = [
        Progress(ONE, ("<search>a</search>",)),
        Progress(TWO, ("<answer>x; y</answer>",)),
        Progress(TWO, ("<search>b</search>", "<search>c</search>")),
        Progress(ONE, ("nothing",)),
        Progress(ONE, ("<search> </search>",)),
    ]
    seen = SearchEnvironment(index).step(live)
    assert index.asked == [["a", "c"]]
    assert [o.text is None for o in seen] == [False, True, False, True, False]
    assert "You have 3 turns left." in seen[0].text
    assert seen[0].text.count("About a") == 3
    assert "You have 4 turns left." in seen[2].text
    assert "No results." in seen[4].text  # no keywords: a turn is spent, nobody is asked


def test_nobody_searches_nobody_is_asked():
    index = Index()
    SearchEnvironment(index).step([Progress(ONE, ("<answer>x</answer>",))])
    assert index.asked == []


def test_the_last_turn_must_answer():
    environment = SearchEnvironment(Index())
    search = "<search>a</search>"
    assert environment.start(ONE).stop == STOPS
    seen = [environment.step([Progress(ONE, (search,) * n)])[0] for n in (1, 2, 3, 4)]
    assert [o.stop for o in seen] == [STOPS, STOPS, LAST_STOPS, ()]
    assert "This is the last turn: answer now." in seen[2].text
    assert seen[3].text is None  # a search on the last turn ends the episode


@pytest.mark.parametrize("task", [ONE, TWO])
def test_a_fixed_number_of_turns_does_not_grow(task):
    """MEM1's code has 6 whatever is asked; here 2, for one question and for two."""
    environment = SearchEnvironment(Index(), turns=2)
    search = "<search>a</search>"
    assert environment.start(task).stop == STOPS
    first, second = (environment.step([Progress(task, (search,) * n)])[0] for n in (1, 2))
    assert (first.stop, second.text) == (LAST_STOPS, None)
    assert SearchEnvironment(Index(), turns=1).start(task).stop == LAST_STOPS


def test_a_prompt_of_ones_own():
    start = SearchEnvironment(Index(), prompt="Tags: <search>. {questions} Begin.").start(TWO)
    assert start.text == "Tags: <search>. Who?; Where? Begin."


def test_credit_without_the_right_number_of_answers_is_a_reward_of_its_own():
    """MEM1's reward in training: 1 for "Ann" alone. Its scores, like ours, are 0."""
    environment = SearchEnvironment(Index(), reward="em_partial", grading="mem1")
    outcome = environment.grade(TWO, ["<answer>the Ann</answer>"])
    assert (outcome.reward, outcome.em, outcome.valid) == (1.0, 0.0, False)


def test_grades_the_last_response():
    environment = SearchEnvironment(Index())
    outcome = environment.grade(TWO, ["<answer>Ann; Vel</answer>", "<answer>Ann; nowhere</answer>"])
    assert (outcome.reward, outcome.em, outcome.f1) == (1.0, 1.0, 1.0)
    assert environment.grade(TWO, ["<answer>Ann</answer>"]).reward == 0.0
    assert environment.grade(TWO, []).reward == 0.0
    assert SearchEnvironment(Index(), reward="f1").grade(ONE, ["<answer>Ann Bee</answer>"]).reward == pytest.approx(
        2 / 3
    )


def longest(task, responses):
    """A user's own reward."""
    return float(len(responses))


def test_a_reward_of_ones_own():
    environment = SearchEnvironment(Index(), reward=f"{__name__}:longest")
    assert environment.grade(TWO, ["a", "b"]).reward == 2.0


def test_a_reward_may_be_a_function_or_its_name():
    assert SearchEnvironment(Index(), reward=longest).grade(TWO, ["a", "b", "c"]).reward == 3.0


def test_an_outcome_says_whether_there_was_an_answer():
    graded = [SearchEnvironment(Index()).grade(TWO, [f"<answer>{said}</answer>"]) for said in ("Ann; Vel", "Ann")]
    assert [(o.em, o.f1, o.valid) for o in graded] == [(2.0, 2.0, True), (0.0, 0.0, False)]


def test_each_episode_searches_as_its_memory_rule_says():
    index = Index()
    live = [Progress(ONE, ("<search>a</search>",), str.upper), Progress(ONE, ("<search>b</search>",))]
    SearchEnvironment(index).step(live)
    assert index.asked == [["A", "b"]]
