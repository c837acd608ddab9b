"""The service over real HTTP: Search-R1's protocol to the letter, many clients at once, limits that say so."""

import asyncio
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import serving
from ties import WORDS, tied_passages, tied_queries

from memopd.retrieval import Hit, Passage, build_index, open_index, write_corpus
from memopd.retrieval.batcher import Batcher
from memopd.retrieval.server import Limits, create_app

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    write_corpus(folder / "corpus.jsonl", [Passage("17", 'Velmora "W"', "A maker\nof clocks é."), *tied_passages(500)])
    build_index(folder / "corpus.jsonl", folder / "index")
    return open_index(folder / "index")


@pytest.fixture(scope="module")
def url(index):
    with serving(create_app(index, Limits(queries=8, characters=100, topk=20))) as url:
        yield url


def ask(url, **request):
    return httpx.post(f"{url}/retrieve", json=request)


# ---- Search-R1's protocol -------------------------------------------------------------------------------------------


def test_with_scores(url, index):
    response = ask(url, queries=["clock maker", "amber"], topk=2, return_scores=True)
    assert response.status_code == 200
    assert list(response.json()) == ["result"]
    first, second = response.json()["result"]
    (hit,) = index.search(["clock maker"], 2)[0]
    assert first == [{"document": {"id": "17", "contents": '"Velmora "W""\nA maker\nof clocks é.'}, "score": hit.score}]
    assert [item["document"]["id"] for item in second] == [h.passage.id for h in index.search(["amber"], 2)[0]]


def test_without_scores_an_item_is_the_document(url):
    document = {"id": "17", "contents": '"Velmora "W""\nA maker\nof clocks é.'}
    for request in ({"return_scores": False}, {}):
        assert ask(url, queries=["clock maker"], topk=2, **request).json() == {"result": [[document]]}


@pytest.mark.parametrize("request_", [{}, {"topk": None}, {"topk": 0}])
def test_three_passages_unless_told(url, request_):
    assert [len(items) for items in ask(url, queries=["amber", "basin"], **request_).json()["result"]] == [3, 3]


def test_nothing_asked_and_nothing_found(url):
    assert ask(url, queries=[]).json() == {"result": []}
    assert ask(url, queries=["", "the", "zzz"]).json() == {"result": [[], [], []]}


def test_fields_of_other_services_are_let_pass(url):
    assert ask(url, queries=["clock"], topk="2", rerank=True).status_code == 200


def test_health(url):
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


# ---- many at once ---------------------------------------------------------------------------------------------------


def test_32_clients_lose_and_mix_up_nothing(url, index):
    """Each asks 10 times, other queries, another number of them and another k each time."""

    def client(seed):
        rng, wrong = random.Random(seed), 0
        with httpx.Client(timeout=60) as http:
            for i in range(10):
                queries = tied_queries(rng.randint(1, 8), seed=1000 * seed + i)
                k = rng.randint(1, 20)
                request = {"queries": queries, "topk": k, "return_scores": True}
                result = http.post(f"{url}/retrieve", json=request).raise_for_status().json()["result"]
                expected = index.search(queries, k)
                got = [[(item["document"]["id"], item["score"]) for item in items] for items in result]
                wrong += got != [[(hit.passage.id, hit.score) for hit in hits] for hits in expected]
        return wrong

    with ThreadPoolExecutor(32) as clients:
        assert list(clients.map(client, range(32))) == [0] * 32


class Echo:
    """Finds the query itself, k times. Records what was asked together; the first time, waits to be let go."""

    def __init__(self):
        self.batches, self.go = [], threading.Event()

    def search(self, queries, k):
        self.batches.append(list(queries))
        assert self.go.wait(10)
        if "bad" in queries:
            raise RuntimeError("as asked")
        return [[Hit(Passage(query, query, ""), 1.0)] * k for query in queries]


def test_requests_that_wait_are_searched_together():
    async def several(index):
        batcher = Batcher(index, most=8)
        first = asyncio.create_task(batcher.search(["first"], 1))
        while not index.batches:
            await asyncio.sleep(0.01)
        rest = [asyncio.create_task(batcher.search([f"{i}a", f"{i}b"], i + 1)) for i in range(6)]
        await asyncio.sleep(0)
        index.go.set()
        return await first, [await one for one in rest]

    index = Echo()
    first, rest = asyncio.run(several(index))
    assert [len(batch) for batch in index.batches] == [1, 8, 4]
    assert [[hit.passage.id for hit in hits] for hits in first] == [["first"]]
    for i, found in enumerate(rest):
        assert [[hit.passage.id for hit in hits] for hits in found] == [[f"{i}a"] * (i + 1), [f"{i}b"] * (i + 1)]


def test_a_failed_search_is_an_answer_and_the_next_works():
    index = Echo()
    index.go.set()
    with serving(create_app(index)) as url:
        assert ask(url, queries=["bad"]).status_code == 500
        assert ask(url, queries=["good"]).status_code == 200


# ---- what a client did wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"queries": WORDS[:9]}, "queries: at most 8 per request, got 9"),
        ({"queries": ["amber", "a" * 101]}, "queries: at most 100 characters each, got 101"),
        ({"queries": ["amber"], "topk": 21}, "topk: at most 20, got 21"),
        ({"queries": ["amber"], "topk": -1}, "topk: must be 0 or more, got -1"),
        ({"queries": ["amber"], "topk": "many"}, 'topk: must be a whole number, got "many"'),
        ({"queries": "amber"}, 'queries: must be a list, got "amber"'),
        ({"queries": [1]}, "queries[0]: must be a string, got 1"),
        ({}, "queries: missing"),
    ],
)
def test_limits_and_types(url, request_, said):
    response = ask(url, **request_)
    assert response.status_code == 422
    assert response.json()["detail"].startswith(said)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"queries": ["\\ud800"]}', b"[" * 9000])
def test_broken_bodies_are_one_line(url, body):
    response = httpx.post(f"{url}/retrieve", content=body, headers=JSON)
    assert response.status_code == 422
    assert "\n" not in response.json()["detail"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_is_not_read_to_its_end(url, chunked):
    sent = []

    def parts():
        for _ in range(1000):
            sent.append(1)
            yield b" " * 65536

    body = parts() if chunked else b" " * 10_000_000
    try:
        response = httpx.post(f"{url}/retrieve", content=body, headers=JSON)
    except httpx.TransportError:  # it hung up on us while we were sending
        assert len(sent) < 1000
        return
    assert response.status_code == 413
    assert "at most 19,600 bytes per request" in response.json()["detail"]


def test_other_methods_and_paths(url):
    assert httpx.get(f"{url}/retrieve").status_code == 405
    assert httpx.get(f"{url}/none").status_code == 404


def test_limits_must_make_sense(index):
    for wrong in ({"queries": 0}, {"topk": -1}, {"characters": 5000}):
        with pytest.raises(ValueError, match="got"):
            Limits(**wrong)
    with pytest.raises(ValueError, match="topk must be between 1 and its limit of 2, got 3"):
        create_app(index, Limits(topk=2))


def test_the_largest_request_fits(index):
    limits = Limits()
    with serving(create_app(index, limits)) as url:
        body = json.dumps({"queries": ["\U0001f600" * limits.characters] * limits.queries})
        assert len(body) > 20_000_000
        assert httpx.post(f"{url}/retrieve", content=body, headers=JSON, timeout=60).status_code == 200
