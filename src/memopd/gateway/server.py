"""A recording gateway between agents and any engine: routes, names, bodies and headers.

You change an agent's base URL to `/episodes/NAME/v1`, or you keep `/v1` and send the episode's name in the header
`x-memopd-episode`. `POST /episodes/NAME/reward` ends the episode. Before an answer ends, the journal has the ids that
the model read and sampled. `recorder.py` does that for every wire format in `wire/`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from memopd.engine.protocol import LiveEngine
from memopd.gateway import TOKEN
from memopd.gateway.ask import ApiError, Json
from memopd.gateway.calls import Label, RunningCall
from memopd.gateway.episodes import Ledger
from memopd.gateway.recorder import Recorder
from memopd.gateway.wire import messages
from memopd.gateway.wire.chat import ChatRequest, CompletionRequest
from memopd.gateway.wire.messages import CountRequest, MessagesRequest
from memopd.gateway.wire.responses import ResponsesRequest
from memopd.gateway.wire.shapes import Answer, Shape, Text, openai_error, parse
from memopd.http import Guard, Refusal, check_listener

log = logging.getLogger(__name__)

MAX_BODY = 16 << 20
_NAME = re.compile(r"[\w.:@+=,~-]{1,200}")  # an episode's name, which is part of a path and of log lines
_EPISODE_HEADERS = ("x-memopd-episode", "x-session-id")


class Outcome(Shape):
    """The reward that ends an episode."""

    reward: float
    task: Text | None = None


def create_app(
    engine: LiveEngine,
    store: str | Path,
    *,
    model: str,
    token: str | None = None,
    host: str = "127.0.0.1",
    store_delay: float = 5.0,
) -> FastAPI:
    """Create the app. It continues the episodes in the store's journal. The caller closes the engine.

    `model` is the name that clients request, `token` the secret that they must send, and `host` the address that the
    server listens on. Finished episodes are written to the store after `store_delay` seconds, so that many share a
    part.
    """
    check_listener(host, token, TOKEN)
    recorder = Recorder(engine, Ledger(store), model, store_delay)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        recorder.start()
        yield
        await recorder.stop()

    def refusal(scope: Scope, refused: Refusal) -> Json:
        request, error = Request(scope), ApiError(refused.status, refused.code, refused.message)
        _log_failure(request, error)
        return _error_body(request, error)

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, host=host, token=token, answer=refusal)
    calls = _call_routes(recorder, model)
    app.include_router(calls, prefix="/episodes/{name}/v1")
    app.include_router(calls, prefix="/v1")

    @app.post("/episodes/{name}/reward")
    async def reward(name: str, request: Request) -> Json:
        _check_name(name)
        outcome = parse(Outcome, await _json(request))
        await recorder.finish(name, outcome.reward, outcome.task)
        return {"episode": name, "finished": True, "reward": outcome.reward}

    @app.get("/episodes/{name}")
    async def summary(name: str) -> Json:
        _check_name(name)
        return recorder.summary(name)

    @app.get("/health")
    async def health() -> Response:
        state, broken = recorder.state
        return JSONResponse({"status": str(broken or "ok")} | state, 503 if broken else 200)

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        _log_failure(request, error)
        return JSONResponse(_error_body(request, error), error.status)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        """The route does not exist, or does not accept this method."""
        return await refused(request, ApiError(error.status_code, "unknown_route", str(error.detail)))

    return app


def _call_routes(recorder: Recorder, model: str) -> APIRouter:
    """The routes that exist twice: with the episode's name in the path, and with its name in a header."""
    routes = APIRouter()
    listed = {"id": model, "object": "model", "type": "model", "display_name": model, "created": 0}
    listed |= {"created_at": "1970-01-01T00:00:00Z", "owned_by": "memopd"}

    @routes.post("/chat/completions")
    async def chat(request: Request, label: _Labelled) -> Response:
        return await _complete(recorder, request, label, ChatRequest)

    @routes.post("/completions")
    async def completions(request: Request, label: _Labelled) -> Response:
        return await _complete(recorder, request, label, CompletionRequest)

    @routes.post("/messages")
    async def create_message(request: Request, label: _Labelled) -> Response:
        return await _complete(recorder, request, label, MessagesRequest)

    @routes.post("/messages/count_tokens")
    async def count_tokens(request: Request) -> Json:
        asked = parse(CountRequest, await _json(request))
        return {"input_tokens": await recorder.count(_episode(request) or "", asked.ask())}

    @routes.post("/responses")
    async def create_response(request: Request, label: _Labelled) -> Response:
        return await _complete(recorder, request, label, ResponsesRequest)

    @routes.get("/models")
    async def models(request: Request) -> Json:
        _check_name(request.path_params.get("name", "any"))
        return {"object": "list", "data": [listed], "first_id": model, "last_id": model, "has_more": False}

    @routes.get("/models/{wanted:path}")
    async def one_model(request: Request, wanted: str) -> Json:
        _check_name(request.path_params.get("name", "any"))
        recorder.check_model(wanted)
        return listed

    return routes


def _episode(request: Request) -> str | None:
    given = [request.path_params.get("name"), *(request.headers.get(header) for header in _EPISODE_HEADERS)]
    episode = next((name for name in given if name), None)
    if episode is not None:
        _check_name(episode)
    return episode


def _label(request: Request) -> Label:
    """The episode in the path or in a header, and what the headers say about the call."""
    episode = _episode(request)
    if episode is None:
        message = "name the episode: use /episodes/NAME/v1 as the base URL, or send the header x-memopd-episode"
        raise ApiError(400, "no_episode", message)
    purpose = request.headers.get("x-memopd-purpose", "")
    if purpose and not _NAME.fullmatch(purpose):
        message = "x-memopd-purpose must be 1 to 200 letters, digits and . _ : @ + = , ~ -"
        raise ApiError(400, "invalid_name", message)
    trainable = request.headers.get("x-memopd-trainable", "true").lower()
    if trainable not in ("true", "false"):
        raise ApiError(400, "invalid_request", "x-memopd-trainable must be true or false")
    return Label(episode, purpose, trainable == "true")


_Labelled = Annotated[Label, Depends(_label)]


async def _complete(recorder: Recorder, request: Request, label: Label, shape: Any) -> Response:
    asked = parse(shape, await _json(request))
    ask = asked.ask()
    call = recorder.begin(label, ask)
    if not await _until_disconnect(request, call.first_token() if ask.stream else asyncio.wait([call.task])):
        call.cancel()
        return Response(status_code=499)  # nobody receives it; 499 is nginx's status for a closed connection
    if call.task.cancelled():
        raise ApiError(503, "stopping", "the gateway stops")
    if call.task.done() and call.task.exception():
        await call.task  # raises
    answer: Answer = asked.answer(f"{call.episode}-{call.number}")
    if ask.stream:
        return _EventStream(call, _events(recorder, call, answer, request), _headers(call))
    return JSONResponse(answer.body(await recorder.said(call, answer.call_ids)), headers=_headers(call))


async def _events(recorder: Recorder, call: RunningCall, answer: Answer, request: Request) -> AsyncIterator[str]:
    """Yield server-sent events. The last ones come after the call is in the journal."""
    try:
        for event in answer.opening(call.prompt):
            yield event
        given = 0
        async for piece in recorder.stream(call):
            given += len(piece)
            for event in answer.piece(piece):
                yield event
        said = await recorder.said(call, answer.call_ids)
        for event in answer.closing(said.text[given:], said):
            yield event
    except ApiError as error:  # the status has been sent already
        _log_failure(request, error)
        for event in answer.failure(error):
            yield event


class _EventStream(StreamingResponse):
    """The server-sent events of a call. If the stream ends early for any reason, the call is cancelled."""

    def __init__(self, call: RunningCall, events: AsyncIterator[str], headers: dict[str, str]) -> None:
        super().__init__(events, headers=headers | {"cache-control": "no-cache"}, media_type="text/event-stream")
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()


async def _until_disconnect(request: Request, work: Coroutine[Any, Any, Any]) -> bool:
    """Run `work` and return True, or return False as soon as the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(disconnected())
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    done = tasks[0].done()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return done


def _headers(call: RunningCall) -> dict[str, str]:
    """What the client should know about the recorded call."""
    headers = {"x-memopd-trainable": "true" if call.trainable else "false"}
    if note := call.training_note:
        headers["x-memopd-training"] = note
    if history := call.history.replies:
        first = call.history.first
        where = "" if first is None else f"; first={first}"
        headers["x-memopd-drift"] = f"replies={history}; drifted={call.history.drifted}{where}"
    if call.cut is not None:
        headers["x-memopd-max-tokens"] = f"{call.sampling.max_tokens}; asked={call.cut}"
    return headers


def _check_name(episode: str) -> None:
    if not _NAME.fullmatch(episode):
        message = "an episode's name must be 1 to 200 letters, digits and . _ : @ + = , ~ -"
        raise ApiError(400, "invalid_name", message)


def _error_body(request: Request, error: ApiError) -> Json:
    """In the form that the route's clients read."""
    is_messages = re.search(r"/v1/messages(/|$)", request.url.path)
    return messages.error_body(error) if is_messages else openai_error(error)


def _log_failure(request: Request, error: ApiError) -> None:
    """Log the route and the reason in one line, without any text from the request: that could be part of a prompt."""
    about = f" ({error.param})" if error.param else f": {error.cause}" if error.cause else ""
    log.warning("%s %s: %d %s%s", request.method, quote(request.url.path)[:300], error.status, error.code, about)


async def _json(request: Request) -> object:
    size, chunks = 0, []
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY:
                raise ApiError(413, "body_too_large", f"the body is larger than {MAX_BODY} bytes")
            chunks.append(chunk)
    except ClientDisconnect:
        raise ApiError(400, "hung_up", "the client disconnected before the end of the body") from None
    try:
        body: object = json.loads(b"".join(chunks))
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not JSON") from None
    return body
