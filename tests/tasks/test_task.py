"""What a question and a task must have."""

import pytest

from memopd.tasks import Question, Task


@pytest.mark.parametrize(
    ("text", "answers", "message"),
    [
        (" ", ("a",), "question 'q': text: must not be empty"),
        ("who?", (), "question 'q': answers: must be one or more strings"),
        ("who?", ("a", 3), "question 'q': answers: must be one or more strings"),
    ],
)
def test_a_question_has_text_and_answers(text, answers, message):
    with pytest.raises(ValueError, match=message):
        Question("q", text, answers)


def test_a_task_has_questions():
    with pytest.raises(ValueError, match="task 't': questions: must not be empty"):
        Task("t", ())
    assert Task("t", (Question("q", "who?", ("a",)),) * 8).k == 8
