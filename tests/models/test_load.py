"""Models and tokenizers from disk, and one line where there is none."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from memopd.models.load import (
    backbone,
    check_model_folder,
    check_same_tokenizer,
    critic_from,
    load_causal_lm,
    load_tokenizer,
)
from memopd.verify.families import FAMILIES, tiny_model


@pytest.mark.parametrize("path", ["./model", "/no/such/model", "a/b/c", "here/model"])
def test_a_folder_without_a_model_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()  # a name that starts with a folder which is there is no hub name
    with pytest.raises(ValueError, match=f"^{path}: there is no model here"):
        check_model_folder(path)
    with pytest.raises(ValueError, match=f"^{path}: there is no model here"):
        load_causal_lm(path, torch.float32)


def test_a_hub_name_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_model_folder("Qwen/Qwen2.5-3B")
    check_model_folder("gpt2")


def test_a_configuration_alone_gives_the_weights_of_its_seed(tmp_path):
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(FAMILIES["qwen2"]().to_dict()))
    a, again, b = (load_causal_lm(str(shape), torch.float32, seed) for seed in (3, 3, 4))
    weights = [model.get_input_embeddings().weight for model in (a, again, b)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_critic_starts_at_zero_on_the_students_backbone():
    student = tiny_model("qwen2")
    critic, ids = critic_from(student), torch.tensor([[5, 6, 7]])
    critic.eval()
    with torch.no_grad():
        assert not critic(input_ids=ids).logits.any()
        ours, theirs = (backbone(m)(input_ids=ids, use_cache=False).last_hidden_state for m in (critic, student))
    assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="Mamba2ForCausalLM: transformers has no critic of its kind"):
        critic_from(tiny_model("mamba2 (recurrent)"))


@pytest.mark.parametrize("local", [True, False])
def test_a_missing_tokenizer_is_one_line(local, tmp_path):
    with pytest.raises(ValueError, match="no tokenizer can be loaded from it") as error:
        load_tokenizer(str(tmp_path), local)
    assert "\n" not in str(error.value)


def test_tokenizers_must_mean_the_same(tmp_path):
    for name, words in (("a", ["x", "y"]), ("b", ["y", "x"]), ("c", ["x", "y"])):
        tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="x"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / name)
    a, b, c = (str(tmp_path / name) for name in "abc")
    check_same_tokenizer(a, c)
    check_same_tokenizer("/one/model", "/one/model")  # it has one meaning for an id, whatever that is
    (tmp_path / "bare").mkdir()
    for student, teacher in ((a, "none"), (a, "bare"), ("bare", a)):
        paths = [path if path == a else str(tmp_path / path) for path in (student, teacher)]
        with pytest.raises(
            ValueError, match="a teacher is used only if its tokenizer and the student's can be compared"
        ):
            check_same_tokenizer(*paths)
    with pytest.raises(ValueError, match="different tokenizers") as error:
        check_same_tokenizer(a, b)
    assert a in str(error.value)
    assert b in str(error.value)
