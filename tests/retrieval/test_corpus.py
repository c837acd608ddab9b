"""wiki-18's format in and out; a row that cannot be used is named, and left out only when asked."""

import gzip
import json
from operator import length_hint

import pytest

from memopd.retrieval import Passage, build_index, read_corpus, read_info, write_corpus

GOOD = {"id": "17", "contents": '"Velmora Works"\nA maker of clocks.'}
BAD = {
    "not a line of JSON": b'{"id": "18", "contents": ',
    "not UTF-8": b'{"id": "18", "contents": "\xff\\n"}',
    "must be a JSON object": b'["18", "text"]',
    "id: missing": b'{"contents": "\\"T\\"\\ntext"}',
    "contents: missing": b'{"id": "18"}',
    "id: must be a string": b'{"id": null, "contents": "\\"T\\"\\ntext"}',
    "id: must be a string, not empty": b'{"id": "", "contents": "\\"T\\"\\ntext"}',
    "contents: must be a string": b'{"id": "18", "contents": ["T", "text"]}',
    "contents: must be a title line": b'{"id": "18", "contents": "text alone"}',
    "surrogate": b'{"id": "18", "contents": "\\"T\\"\\n\\ud800"}',
    "id: '17' is also the id of an earlier row": json.dumps(GOOD).encode(),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_corpus_is_read_in_order(tmp_path, suffix):
    rows = [GOOD, {"id": 18, "contents": "No quotes\nText."}, {"id": "a", "contents": '""Odd" one"\n\nTwo\nlines'}]
    data = "\n\n".join(json.dumps(row) for row in rows).encode()  # no newline at the end, blank lines between
    path = tmp_path / f"corpus{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    corpus = read_corpus(path)
    assert list(corpus) == [
        Passage("17", "Velmora Works", "A maker of clocks."),
        Passage("18", "No quotes", "Text."),
        Passage("a", '"Odd" one', "\nTwo\nlines"),
    ]
    assert [p.contents for p in corpus][::2] == [row["contents"] for row in rows][::2]
    assert corpus.skipped == 0


@pytest.mark.parametrize("name", ["corpus.json", "corpus.json.gz", "corpus.jsonl"])
def test_titles_and_texts_with_or_without_ids(tmp_path, name):
    rows = [
        GOOD,
        {"_id": "b", "title": "BEIR", "text": "Its ids."},
        {"idx": 0, "title": "A\nlist", "text": "Of HippoRAG."},
        {"title": "Velm", "text": "The Velm is a river."},
        {"id": "12", "url": "u", "title": "HotpotQA", "text": ["A sentence.", " Another."], "charoffset": [[]]},
        {"id": 13, "title": "2Wiki", "sentences": ["A sentence.", "Another."], "mentions": []},
    ]
    lines = "\n".join(json.dumps(row) for row in rows) if name.endswith("l") else json.dumps(rows)
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    assert list(read_corpus(path)) == [
        Passage("17", "Velmora Works", "A maker of clocks."),
        Passage("b", "BEIR", "Its ids."),
        Passage("0", "A list", "Of HippoRAG."),
        Passage("4883f6971f92b757", "Velm", "The Velm is a river."),
        Passage("12", "HotpotQA", "A sentence. Another."),
        Passage("13", "2Wiki", "A sentence. Another."),
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"id": "17"}, r"corpus\.json: a \.json corpus must be one list"),
        ([GOOD, 3], r"corpus\.json: item 1: must be a JSON object; .*--skip-bad"),
        ([{"title": 3, "text": "x"}], "item 0: title, text: must be strings"),
        ([{"title": "T", "text": ["x", 3]}], "item 0: title, text: must be strings, or the text a list of sentences"),
    ],
)
def test_a_malformed_list_is_named(tmp_path, value, message):
    (tmp_path / "corpus.json").write_text(json.dumps(value))
    with pytest.raises(ValueError, match=message):
        list(read_corpus(tmp_path / "corpus.json"))


def test_what_is_written_reads_back(tmp_path):
    passages = [Passage(str(i), f'Title "{i}"', f"Text é {i}.\nMore.") for i in range(2500)]
    assert write_corpus(tmp_path / "corpus.jsonl", passages) == 2500
    corpus = read_corpus(tmp_path / "corpus.jsonl")
    assert list(corpus) == passages
    assert 2000 < length_hint(corpus) < 3500


@pytest.mark.parametrize("why", BAD)
def test_a_malformed_row_is_named(tmp_path, why):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), b"", BAD[why], b'{"id": "19", "contents": "T\\ntext"}']))
    with pytest.raises(ValueError, match="--skip-bad") as error:
        list(read_corpus(path))
    assert str(error.value).startswith(f"{path}: line 3: ")
    assert why in str(error.value)


def test_malformed_rows_are_skipped_only_when_asked_and_counted(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *BAD.values(), b'{"id": "19", "contents": "T\\ntext"}']))
    with pytest.raises(ValueError, match="line 2"):
        build_index(path, tmp_path / "index")
    assert not (tmp_path / "index").exists()
    corpus = read_corpus(path, skip_bad=True)
    for _ in range(2):  # counted per pass
        assert [p.id for p in corpus] == ["17", "19"]
        assert corpus.skipped == len(BAD)
    build_index(path, tmp_path / "index", skip_bad=True)
    info = read_info(tmp_path / "index")
    assert (info.passages, info.skipped) == (2, len(BAD))


def test_a_cut_off_file(tmp_path):
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(
        gzip.compress(b"\n".join(b'{"id": "%d", "contents": "T\\n%d"}' % (i, i) for i in range(999)))[:-50]
    )
    for skip_bad in (False, True):
        with pytest.raises(ValueError, match="cut off or damaged"):
            list(read_corpus(path, skip_bad))
    assert length_hint(read_corpus(path)) == 0


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        read_corpus(tmp_path / "none.jsonl")
