"""models/: small enough, safe, and read as they were trained."""

from pathlib import Path

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from memopd.agent.protocol import information, user_message
from memopd.models.load import load_tokenizer
from memopd.world.encyclopedia import make_world, tasks

MODELS = Path(__file__).parents[1] / "models"


def test_both_are_there_and_small():
    files = [f for f in MODELS.rglob("*") if f.is_file()]
    assert {f.suffix for f in files} <= {".safetensors", ".json", ".jinja", ".md"}
    assert sum(f.stat().st_size for f in files) < 30e6


@pytest.mark.parametrize(("name", "millions"), [("student", 2.98), ("teacher", 10.0)])
def test_parameters(name, millions):
    count = 0
    for file in (MODELS / name).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118 - no mapping
    assert count / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("name", ["student", "teacher"])
def test_the_worlds_text_has_the_ids_that_it_was_trained_with(name):
    """transformers gives every Qwen2 model Qwen's rules of splitting words, whatever its tokenizer.json says."""
    loaded, saved = load_tokenizer(str(MODELS / name)), Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    world = make_world(1_000, seed=0)
    texts = [information([(p.title, p.text)], 3) for p in world.passages]
    texts += [user_message(task) for task in tasks(world, 2, "train")[:200]]
    texts += ["<think>Summary. 1: Dulvin Ziltifa. Now 2.</think>\n<search>Kulbin College pupils</search>"]
    texts += ["<answer>Dulvin Ziltifa; 1,206</answer>"]
    other = [text for text in texts if loaded.encode(text, add_special_tokens=False) != saved.encode(text).ids]
    assert other == []
    strange = "e\u0301"  # Qwen's rules make one letter of it: the two do differ, though not in the world's text
    assert loaded.encode(strange, add_special_tokens=False) != saved.encode(strange).ids
