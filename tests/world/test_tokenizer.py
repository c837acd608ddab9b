import random
from collections import Counter
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from memopd.world.encyclopedia import make_world
from memopd.world.tokenizer import train_tokenizer

TAGS = ("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")


@pytest.fixture(scope="module")
def texts():
    world = make_world(1_000, seed=0)
    return [p.contents for p in world.passages] + [q.text for qs in world.questions.values() for q in qs]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts, 1024)


def test_two_trainings_give_one_tokenizer_whatever_the_order(texts, tokenizer, tmp_path):
    other = list(texts)
    random.Random(1).shuffle(other)
    tokenizer.save_pretrained(tmp_path / "a")
    train_tokenizer(other, 1024).save_pretrained(tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert "tokenizer.json" in files
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


@pytest.mark.parametrize("size", [300, 1024, 2048])
def test_the_size_is_exact(texts, size):
    tokenizer = train_tokenizer(texts, size)
    assert len(tokenizer) == tokenizer.vocab_size == size
    assert sorted(tokenizer.get_vocab().values()) == list(range(size))


def test_sizes_that_cannot_be_had():
    with pytest.raises(ValueError, match="more than 259 entries, got 259"):
        train_tokenizer(["a text"], 259)
    with pytest.raises(ValueError, match=r"the texts give only 26\d entries, but the size must be 1024"):
        train_tokenizer(["a text"], 1024)


def test_it_loads_as_it_was_saved(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == 1024
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.get_vocab() == tokenizer.get_vocab()
    text = "<think>Velko stands on the Sorn River.</think>\n<search>Sorn River length</search>"
    assert loaded.encode(text) == tokenizer.encode(text)
    turn = [{"role": "user", "content": "How long is it?"}]
    prompt = loaded.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHow long is it?<|im_end|>\n<|im_start|>assistant\n"
    assert loaded.decode(loaded.encode(prompt)) == prompt


def test_special_tokens_are_single_and_tags_are_text(tokenizer):
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(token)) == 1
        assert token in tokenizer.all_special_tokens
    for tag in TAGS:
        assert len(tokenizer.encode(tag)) > 1
        assert tokenizer.decode(tokenizer.encode(tag), skip_special_tokens=True) == tag


def test_digits_stand_alone(tokenizer):
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("in 1852, 12,480 people")]
    assert [p for p in pieces if any(c.isdigit() for c in p)] == list("185212480")


def test_nothing_is_added_and_nothing_lost_in_the_world(texts, tokenizer):
    for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True):
        assert tokenizer.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("size", [1024, 2048, 4096])
def test_the_page_counts_tokens(size):
    world = make_world(20_000, seed=0)
    questions = [q for qs in world.questions.values() for q in qs]
    tokenizer = train_tokenizer([p.contents for p in world.passages] + [q.text for q in questions], size)

    def encode(texts):
        return tokenizer(list(texts))["input_ids"]

    needed = {step.title for q in world.questions["train"] for step in q.steps}
    passages = encode(p.contents for p in world.passages)
    met = Counter(i for p, ids in zip(world.passages, passages, strict=True) if p.title in needed for i in ids)
    met.update(i for ids in encode(q.text for q in world.questions["train"]) for i in ids)
    answers = encode(f" {q.answers[0]}" for q in world.questions["test"])
    rare = mean(met[i] < 100 for ids in answers for i in ids)
    lengths = [mean(len(ids) for ids in some) for some in (passages, encode(q.text for q in questions), answers)]
    row = f"| {size:,} | " + " | ".join(f"{length:.1f}" for length in lengths) + f" | {100 * rare:.1f} % |"
    assert row in (Path(__file__).parents[2] / "docs" / "world.md").read_text()
