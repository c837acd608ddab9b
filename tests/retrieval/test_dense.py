"""The dense index against brute force over embeddings computed by hand, with a tiny random model made here."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from ties import WORDS, tied_passages, tied_queries
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from memopd.retrieval import Passage, build_index, dense, open_index, read_info, write_corpus

PASSAGES = tied_passages(300)


def tiny_encoder(folder, seed=0):
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", '"', *WORDS]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(seed)
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=len(words), initializer_range=0.5, **small))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_encoder(tmp_path_factory.mktemp("models") / "tiny-e5")


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    write_corpus(folder / "corpus.jsonl", PASSAGES)
    build_index(folder / "corpus.jsonl", folder / "index", "dense", model)
    return folder / "index"


@pytest.fixture(scope="module")
def index(folder):
    return open_index(folder)


def embed(model, texts):
    """E5's way, one text at a time: the mean over at most 256 tokens, scaled to length 1."""
    tokenizer, encoder = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)
    vectors = []
    for text in texts:
        with torch.no_grad():
            states = encoder(**tokenizer(text, truncation=True, max_length=256, return_tensors="pt")).last_hidden_state
        mean = states[0].mean(0).double()
        vectors.append((mean / mean.norm()).numpy())
    return np.stack(vectors)


def test_answers_are_those_of_brute_force(model, index):
    queries = tied_queries(50)
    passages = embed(model, [f"passage: {p.contents}" for p in PASSAGES])
    scores = embed(model, [f"query: {q}" for q in queries]) @ passages.T
    for k in (1, 5, 400):
        for row, hits in zip(scores, index.search(queries, k), strict=True):
            best = np.sort(row)[::-1][:k]
            assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-5)
            by_id = {p.id: score for p, score in zip(PASSAGES, row, strict=True)}
            assert [hit.score for hit in hits] == pytest.approx([by_id[hit.passage.id] for hit in hits], abs=1e-5)


def test_without_its_prefix_a_query_is_another(model, index):
    """That the check above could have failed."""
    query = tied_queries(1)[0]
    passages = embed(model, [f"passage: {p.contents}" for p in PASSAGES])
    bare = np.sort(embed(model, [query])[0] @ passages.T)[::-1][:5]
    assert [hit.score for hit in index.search([query], 5)[0]] != pytest.approx(bare, abs=1e-3)


def test_a_passage_comes_back_whole(index):
    known = {p.id: p for p in PASSAGES}
    for hits in index.search(tied_queries(10), 5):
        assert [hit.passage for hit in hits] == [known[hit.passage.id] for hit in hits]


def test_ties_are_broken_by_id_also_at_the_cut(model, tmp_path):
    copies = [Passage(f"c{i * 7919 % 101:03}", "amber", "basin cedar") for i in range(60)]
    write_corpus(tmp_path / "corpus.jsonl", [*PASSAGES, *copies])
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", "dense", model)
    index = open_index(tmp_path / "index")
    queries = ['"amber" basin cedar', *tied_queries(25)]  # as a batch, and alone: faiss computes them differently
    whole = index.search(queries, 1000)
    for query, all_ in zip(queries, whole, strict=True):
        ids = [hit.passage.id for hit in all_ if hit.passage.id.startswith("c")]
        assert ids == sorted(p.id for p in copies)
        for k in (1, 7, 59):
            assert [hit.passage.id for hit in index.search([query], k)[0]] == [hit.passage.id for hit in all_[:k]]


def test_long_passages_are_read_to_256_tokens(model, tmp_path):
    long, longer = ("amber " * 300 + tail for tail in ("basin", "delta delta"))
    write_corpus(tmp_path / "corpus.jsonl", [Passage("a", "cedar", long), Passage("b", "cedar", longer)])
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", "dense", model)
    a, b = open_index(tmp_path / "index").search(["amber"], 2)[0]
    assert a.score == b.score
    assert a.score == pytest.approx(
        float(embed(model, ["query: amber"])[0] @ embed(model, [f'passage: "cedar"\n{long}'])[0]), abs=1e-5
    )


def test_many_chunks_are_one_index(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "_CHUNK", 7)
    build_index(folder.parent / "corpus.jsonl", tmp_path / "index", "dense", model)
    queries = tied_queries(20)
    again, first = (open_index(f).search(queries, 5) for f in (tmp_path / "index", folder))
    for one, other in zip(again, first, strict=True):
        assert [hit.score for hit in one] == pytest.approx([hit.score for hit in other], abs=1e-6)


def test_nothing_to_look_for_finds_nothing(index):
    assert index.search([], 3) == []
    empty, some, blank = index.search(["", "amber", " \n"], 3)
    assert (empty, len(some), blank) == ([], 3, [])


def test_what_it_was_built_with(folder, model):
    info = read_info(folder)
    assert (info.kind, info.passages) == ("dense", 300)
    assert (info.settings["model"], info.settings["width"], info.settings["tokens"]) == (model, 32, 256)


def test_another_model_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="not the model that this index was built with"):
        open_index(folder, tiny_encoder(tmp_path / "other-e5", seed=1))


@pytest.mark.parametrize("missing", ["/no/such/folder", "no-such-organisation/no-such-model"])
def test_a_missing_model(missing, folder, tmp_path):
    with pytest.raises(ValueError, match=missing):
        build_index(folder.parent / "corpus.jsonl", tmp_path / "index", "dense", missing)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_has_moved(folder, tmp_path):
    model = Path(tiny_encoder(tmp_path / "tiny-e5"))
    build_index(folder.parent / "corpus.jsonl", tmp_path / "index", "hybrid", str(model))
    moved = str(model.rename(tmp_path / "moved-e5"))
    with pytest.raises(ValueError, match=r"its embedding model was in .*/tiny-e5, where it is no more: put it back"):
        open_index(tmp_path / "index")
    assert open_index(tmp_path / "index", moved).search([PASSAGES[0].text], 1)[0]


def test_the_model_belongs_to_the_kind(folder, tmp_path):
    for kind, model in (("dense", None), ("lexical", "any")):
        with pytest.raises(ValueError, match="--model"):
            build_index(folder.parent / "corpus.jsonl", tmp_path / "index", kind, model)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("bge", (None, None), ("", "")),
        ("e5-base", (None, None), ("query: ", "passage: ")),
        ("multilingual-e5-small", (None, None), ("query: ", "passage: ")),
        ("bge", ("find: ", None), ("find: ", "")),
        ("e5-base", ("", ""), ("", "")),
    ],
)
def test_prefixes(tmp_path, name, given, expected):
    """Those of E5 for a model that is called so, none for others, and your own before both."""
    encoder = tiny_encoder(tmp_path / name)
    write_corpus(tmp_path / "corpus.jsonl", PASSAGES[:20])
    info = build_index(tmp_path / "corpus.jsonl", tmp_path / "index", "dense", encoder, prefixes=given)
    assert (info.settings["query"], info.settings["passage"]) == expected
    (hit,) = open_index(tmp_path / "index").search(["amber"], 1)[0]
    texts = [expected[0] + "amber", expected[1] + hit.passage.contents]
    assert hit.score == pytest.approx(float(np.prod(embed(encoder, texts), axis=0).sum()), abs=1e-5)


def test_prefixes_that_the_model_defines(tmp_path):
    encoder = tiny_encoder(tmp_path / "prompted")
    (tmp_path / "prompted" / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "query: ", "document": "amber: "}, "default_prompt_name": "query"})
    )
    (tmp_path / "prompted" / "modules.json").write_text(
        json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}])
    )  # fmt: skip
    (tmp_path / "prompted" / "1_Pooling").mkdir()
    (tmp_path / "prompted" / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    )
    write_corpus(tmp_path / "corpus.jsonl", PASSAGES[:20])
    info = build_index(tmp_path / "corpus.jsonl", tmp_path / "index", "dense", encoder)
    assert (info.settings["query"], info.settings["passage"]) == ("query: ", "amber: ")
    (hit,) = open_index(tmp_path / "index").search(["basin"], 1)[0]
    texts = ["query: basin", f"amber: {hit.passage.contents}"]  # once: the default prompt is not added to them
    assert hit.score == pytest.approx(float(np.prod(embed(encoder, texts), axis=0).sum()), abs=1e-5)


def test_passages_are_looked_up_by_id(index):
    assert index.passages([PASSAGES[7].id, "none"]) == {PASSAGES[7].id: PASSAGES[7]}


MINILM = Path(os.environ.get("MEMOPD_MINILM", "/no/such/folder"))


@pytest.mark.skipif(not MINILM.is_dir(), reason="needs all-MiniLM-L6-v2: name its folder in MEMOPD_MINILM")
def test_minilm_as_its_card_computes_it(tmp_path):
    """Mean pooling over the attention mask, length 1, 256 tokens and no prefix, as sentence-transformers documents."""
    passages = [*PASSAGES[:20], Passage("long", "Velm", "The Velm is a river of Tarn. " * 100)]
    write_corpus(tmp_path / "corpus.jsonl", passages)
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index", "dense", str(MINILM))
    expected = embed(str(MINILM), [p.contents for p in passages])
    query = embed(str(MINILM), ["where is the river"])[0]
    hits = open_index(tmp_path / "index").search(["where is the river"], len(passages))[0]
    scores = {p.id: float(query @ vector) for p, vector in zip(passages, expected, strict=True)}
    assert [hit.score for hit in hits] == pytest.approx([scores[hit.passage.id] for hit in hits], abs=1e-5)
    assert hits[0].passage.id == "long"
