"""The client against our service, and against services that behave otherwise."""

import pytest
from fastapi import FastAPI, HTTPException, Request
from serving import serving
from ties import tied_passages, tied_queries

from memopd.retrieval import Passage, build_index, client, open_index, write_corpus
from memopd.retrieval.client import RemoteIndex
from memopd.retrieval.server import Limits, create_app


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("client")
    write_corpus(folder / "corpus.jsonl", tied_passages(500))
    build_index(folder / "corpus.jsonl", folder / "index")
    return open_index(folder / "index")


@pytest.fixture(scope="module")
def url(index):
    with serving(create_app(index)) as url:
        yield url


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(client, "_WAITS", (0.05, 0.05))


def other(answer):
    """A service whose /retrieve does what `answer` says."""
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request):
        return answer(await request.json())

    return serving(app)


@pytest.mark.parametrize("end", ["", "/", "/retrieve", "/retrieve/"])
def test_a_remote_index_answers_like_the_one_it_serves(url, index, end):
    remote = open_index(url + end)
    queries = [*tied_queries(20), "", "the", "amber\ud800", "basin " * 5000]
    assert remote.search(queries, 7) == index.search(queries, 7)
    assert remote.search([], 7) == []


def test_more_queries_than_a_request_takes(index, url):
    queries = tied_queries(600)
    assert RemoteIndex(url).search(queries, 2) == index.search(queries, 2)


def test_a_service_without_ids(url):
    """Search-R1's own, with BM25: title, text and contents, no id; and more than was asked for."""
    item = {"document": {"title": "T", "text": "text", "contents": '"T"\ntext'}, "score": 2}
    with other(lambda asked: {"result": [[item] * 5 for _ in asked["queries"]]}) as url:
        (hits,) = RemoteIndex(url).search(["q"], 3)
    assert [(hit.passage, hit.score) for hit in hits] == [(Passage("", "T", "text"), 2.0)] * 3


def test_what_passes_is_tried_again():
    tries = []

    def busy_twice(asked):
        tries.append(asked)
        if len(tries) < 3:
            raise HTTPException(503, "busy")
        return {"result": [[]]}

    with other(busy_twice) as url:
        assert RemoteIndex(url).search(["q"], 3) == [[]]
    assert tries == [{"queries": ["q"], "topk": 3, "return_scores": True}] * 3


def test_what_does_not_pass_is_said():
    def busy(asked):
        raise HTTPException(503, "busy")

    with other(busy) as url, pytest.raises(ValueError, match=r"/retrieve: status 503: .*busy"):
        RemoteIndex(url).search(["q"], 3)


def test_a_limit_of_the_service_is_said_at_once(index):
    limited = serving(create_app(index, Limits(topk=5)))
    with limited as url, pytest.raises(ValueError, match=r"status 422: .*topk: at most 5, got 6"):
        RemoteIndex(url).search(["q"], 6)


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"result": None},
        {"result": [[{"contents": "T\ntext"}]]},
        {"result": [[{"document": {}, "score": 1}]]},
        7,
    ],
)
def test_an_answer_in_another_protocol(answer):
    with other(lambda asked: answer) as url, pytest.raises(ValueError, match="not an answer in Search-R1's protocol"):
        RemoteIndex(url).search(["q"], 3)


def test_answers_missing():
    with other(lambda asked: {"result": [[]]}) as url, pytest.raises(ValueError, match="1 answers to 2 queries"):
        RemoteIndex(url).search(["q", "r"], 3)


def test_nobody_there():
    with pytest.raises(ConnectionError, match=r"no answer in 3 tries .*; is it running\?"):
        open_index("http://127.0.0.1:9/").search(["q"], 3)


@pytest.mark.parametrize("wrong", ["http://", "http://[::1", "http://localhost:port"])
def test_no_address(wrong):
    with pytest.raises((ValueError, ConnectionError), match="http://"):
        open_index(wrong).search(["q"], 3)
