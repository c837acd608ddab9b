"""A chat template that is missing, broken or leaves the question out is one line, before a model is loaded."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memopd import cli
from memopd.agent.codec import check_template, prefix_of
from memopd.models.load import load_tokenizer

STUDENT = Path(__file__).parents[2] / "models" / "student"


def folder_with(template: str | None, tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    shutil.copytree(STUDENT, folder, ignore=shutil.ignore_patterns("*.safetensors", "digests.json", "*.jinja"))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (None, r"its chat template cannot be used \(Cannot use chat template functions"),
        ("{% for m in messages %}{{ m.content }", r"its chat template cannot be used \(unexpected '}'\)"),
        ("{{ nobody.said.so }}", r"its chat template cannot be used \('nobody' is undefined\)"),
        ("{{ raise_exception('no user\n here') }}", r"its chat template cannot be used \(no user\)"),
        (
            "{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}",
            "its chat template leaves out the user's turn",
        ),
    ],
)
def test_a_template_that_makes_no_prompt(template, why, tmp_path):
    folder = folder_with(template, tmp_path)
    with pytest.raises(ValueError, match=f"{folder}: {why}"):
        check_template(load_tokenizer(str(folder)))


def test_what_a_template_may_do(tmp_path):
    tokenizer = load_tokenizer(str(folder_with("[{{ messages[0].content | trim }}]", tmp_path)))
    check_template(tokenizer)
    for message in ("", "  a question\n", "a\n\nb"):
        assert tokenizer.decode(prefix_of(tokenizer, message)) == f"[{message.strip()}]"


def test_a_template_may_change_what_stands_in_a_message(tmp_path):
    template = "{{ messages[0].content | replace('/no_think', '') | e }}"
    tokenizer = load_tokenizer(str(folder_with(template, tmp_path)))
    check_template(tokenizer)
    assert tokenizer.decode(prefix_of(tokenizer, "a < b? /no_think")) == "a &lt; b? "


def test_a_rollout_says_so_before_it_loads_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("memopd.cli.rollout.load_sampler", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "tasks.jsonl").write_text('{"id": "0", "question": "who", "golden_answers": ["x"]}\n')
    monkeypatch.setattr("memopd.agent.parts.open_index", lambda _: None)
    model = folder_with("{{ nobody.said.so }}", tmp_path)
    options = ["--model", model, "--index", tmp_path, "-o", tmp_path / "episodes"]
    done = CliRunner().invoke(cli.app, ["rollout", str(tmp_path / "tasks.jsonl"), *map(str, options)])
    assert isinstance(done.exception, ValueError), done.output
    assert f"{model}: its chat template cannot be used ('nobody' is undefined)" in str(done.exception)
