"""A retrieval service that uses Search-R1's protocol, so that existing clients work unchanged.

    POST /retrieve  {"queries": ["..."], "topk": 3, "return_scores": true}
                    {"result": [[{"document": {"id": "17", "contents": "\\"Title\\"\\ntext"}, "score": 1.0}, ...]]}
    GET /health     {"status": "ok"}

The answer to an invalid request is 4xx and {"detail": "one line that says what to do"}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from pydantic import BaseModel, Field, ValidationError

from memopd import schema
from memopd.http import Guard, check_listener
from memopd.retrieval.batcher import Batcher
from memopd.retrieval.client import TOKEN
from memopd.retrieval.index import MAX_QUERY, Hit, Index


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request. A body may be as long as the longest queries in JSON."""

    queries: int = 512
    characters: int = MAX_QUERY  # per query
    topk: int = 100

    def __post_init__(self) -> None:
        if min(self.queries, self.characters, self.topk) < 1:
            raise ValueError(f"limits must be 1 or more, got {self}")
        if self.characters > MAX_QUERY:
            raise ValueError(f"no index reads more than {MAX_QUERY} characters of a query, got {self.characters}")

    @property
    def body(self) -> int:
        return 10_000 + 12 * self.queries * self.characters  # a character takes up to 12 bytes in JSON


class Query(BaseModel):
    queries: list[str]
    topk: int | None = Field(None, ge=0)  # null and, as in Search-R1, 0: the server's default
    return_scores: bool = False


def create_app(
    index: Index, limits: Limits | None = None, topk: int = 3, *, token: str | None = None, host: str = "127.0.0.1"
) -> FastAPI:
    """Make the application. `topk` is the number of passages if a request does not say how many.

    `token` is the secret that clients must send, and `host` the address that the server listens on.
    """
    limits = limits or Limits()
    check_listener(host, token, TOKEN)
    if not 1 <= topk <= limits.topk:
        raise ValueError(f"topk must be between 1 and its limit of {limits.topk}, got {topk}")
    batcher = Batcher(index, limits.queries)
    app = FastAPI(title="memopd retrieval", openapi_url=None)
    app.add_middleware(Guard, host=host, token=token, answer=lambda scope, refusal: {"detail": refusal.message})

    @app.post("/retrieve")
    async def retrieve(request: Request) -> dict[str, Any]:
        query = _query(await _body(request, limits.body))
        k = query.topk or topk
        _check(query.queries, k, limits)
        found = await batcher.search(query.queries, k) if query.queries else []
        return {"result": [[_answer(hit, query.return_scores) for hit in hits] for hits in found]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


async def _body(request: Request, most: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise HTTPException(413, f"at most {most:,} bytes per request; send fewer or shorter queries")
    return bytes(body)


def _query(body: bytes) -> Query:
    try:
        return Query.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = schema.place(first["loc"]) or "the body"
        raise HTTPException(422, f"{where}: {schema.message(first)}") from None


def _check(queries: list[str], k: int, limits: Limits) -> None:
    if len(queries) > limits.queries:
        raise HTTPException(422, f"queries: at most {limits.queries:,} per request, got {len(queries):,}")
    if k > limits.topk:
        raise HTTPException(422, f"topk: at most {limits.topk:,}, got {k:,}")
    if (longest := max(map(len, queries), default=0)) > limits.characters:
        raise HTTPException(422, f"queries: at most {limits.characters:,} characters each, got {longest:,}")


def _answer(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.passage.id, "contents": hit.passage.contents}
    return {"document": document, "score": hit.score} if with_score else document
