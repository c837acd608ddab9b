"""A recording gateway: any agent that speaks OpenAI's API, in front of any engine.

An agent points its client at `/episodes/NAME/v1` and works as it always did; `POST /episodes/NAME/reward` ends the
episode. What the model read and what it sampled is in the journal, as ids, before the answer ends.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from memopd.engine.protocol import Completion, LiveEngine
from memopd.gateway.calls import Events, Flight, unless_gone
from memopd.gateway.drift import History, Reply, chat_ids, drift, encode, reply_of
from memopd.gateway.episodes import Ledger, Recorded
from memopd.gateway.openai_api import Answer, ApiError, Asked, Json, asked, logprobs_of, number, text
from memopd.gateway.text import Unfolding, visible
from memopd.record.journal import JournalError
from memopd.types import Call, StopReason

log = logging.getLogger(__name__)

MAX_BODY = 16 << 20
_NAME = re.compile(r"[\w.:@+=,~-]{1,200}")  # of an episode: a piece of a path, and of a line in a log
_DRIFT_HEADER = "x-memopd-drift"


def create_app(
    engine: LiveEngine,
    store: str | Path,
    *,
    model: str,
    token: str | None = None,
    settle: float = 5.0,
) -> FastAPI:
    """The app; it serves at once what an earlier process left in the store's journal. The engine stays the caller's.

    `model` is the name that clients ask for, `token` what they must bring. Finished episodes are in the store
    `settle` seconds later, so that many share a part.
    """
    gateway = _Gateway(engine, Ledger(store), model, token, settle)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/episodes/{name}/v1/chat/completions")
    async def chat(name: str, request: Request) -> Response:
        return await gateway.complete(name, request, chat=True)

    @app.post("/episodes/{name}/v1/completions")
    async def completions(name: str, request: Request) -> Response:
        return await gateway.complete(name, request, chat=False)

    @app.get("/episodes/{name}/v1/models")
    async def models(name: str, request: Request) -> Json:
        gateway.admit(request, name)
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "memopd"}]}

    @app.get("/episodes/{name}/v1/models/{wanted:path}")
    async def one_model(name: str, wanted: str, request: Request) -> Json:
        gateway.admit(request, name)
        gateway.check_model(wanted)
        return {"id": model, "object": "model", "created": 0, "owned_by": "memopd"}

    @app.post("/episodes/{name}/reward")
    async def reward(name: str, request: Request) -> Json:
        return await gateway.reward(name, request)

    @app.get("/episodes/{name}")
    async def summary(name: str, request: Request) -> Json:
        gateway.admit(request, name)
        return gateway.summary(name)

    @app.get("/health")
    async def health() -> Response:
        return gateway.health()

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        _log_failure(request, error)
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        """A route that does not exist, or not with this method."""
        return await refused(request, ApiError(error.status_code, "unknown_route", str(error.detail)))

    return app


class _Gateway:
    def __init__(self, engine: LiveEngine, ledger: Ledger, model: str, token: str | None, settle: float) -> None:
        self._engine, self._ledger, self._model, self._settle = engine, ledger, model, settle
        self._token = token
        self._flights: dict[str, set[Flight]] = {}
        self._finishing: set[str] = set()
        self._finished = asyncio.Event()  # an episode waits to be written to the store
        self._compactor: asyncio.Task[None] | None = None
        # One thread: a tokenizer must not encode in two, and the event loop should not wait for it.
        self._reader = ThreadPoolExecutor(1, "tokenizer")
        self._replies: WeakKeyDictionary[Recorded, Reply] = WeakKeyDictionary()  # decoded once

    # Life

    def start(self) -> None:
        if self._ledger.waiting:
            self._finished.set()
        self._compactor = asyncio.create_task(self._compact_forever())

    async def stop(self) -> None:
        """Calls under way are recorded as aborted, finished episodes go to the store."""
        for flight in (flights := [f for group in self._flights.values() for f in group]):
            flight.hang_up()
        if flights:  # an engine that does not answer keeps nobody waiting for long
            await asyncio.wait([flight.task for flight in flights], timeout=10)
        if self._compactor:
            self._compactor.cancel()
            await asyncio.wait([self._compactor])
        await asyncio.to_thread(self._compact)
        self._ledger.close()
        self._reader.shutdown()

    async def _compact_forever(self) -> None:
        while True:
            await self._finished.wait()
            await asyncio.sleep(self._settle)
            self._finished.clear()
            await asyncio.to_thread(self._compact)
            if self._ledger.waiting:  # it failed, or another finished meanwhile
                self._finished.set()

    def _compact(self) -> None:
        try:
            self._ledger.compact()
        except (ValueError, OSError) as error:  # the journal still has them
            log.error("finished episodes are not in the store yet: %s", error)

    # Routes

    def admit(self, request: Request, episode: str) -> None:
        if self._token is not None:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode("latin-1"), f"Bearer {self._token}".encode()):
                raise ApiError(401, "invalid_api_key", "wrong or missing bearer token")
        if not _NAME.fullmatch(episode):
            raise ApiError(400, "invalid_name", "an episode's name is 1 to 200 letters, digits and . _ : @ + = , ~ -")

    def check_model(self, name: str) -> None:
        if name != self._model:
            message = f"there is no model {name[:60]!r} here, only {self._model!r}"
            raise ApiError(404, "model_not_found", message, "model")

    def _check_journal(self) -> None:
        """Before anything is sampled that could not be recorded."""
        if broken := self._ledger.broken:
            raise ApiError(503, "not_recorded", str(broken))

    def health(self) -> Response:
        opened, finished = self._ledger.counts
        running = sum(map(len, self._flights.values()))
        state = {"model": self._model, "policy_version": self._engine.version}
        state |= {"open": opened, "finished": finished, "running": running}
        if broken := self._ledger.broken:
            return JSONResponse({"status": str(broken)} | state, 503)
        return JSONResponse({"status": "ok"} | state)

    def summary(self, name: str) -> Json:
        reward, recorded = self._ledger.reward(name), self._ledger.calls(name)
        if reward is None and not recorded:
            raise _no_episode(name)
        seen = [r.history for r in recorded]
        return {
            "episode": name,
            "finished": reward is not None,
            "reward": reward,
            "stored": reward is not None and not recorded,  # from then on the store knows about its calls
            "running": len(self._flights.get(name, ())),
            "calls": len(recorded),
            "aborted": sum(r.call.stop is StopReason.ABORTED for r in recorded),
            "prompt_tokens": sum(len(r.call.prompt) for r in recorded),
            "completion_tokens": sum(len(r.call.completion) for r in recorded),
            "drift": [{"call": t} | asdict(h) for t, h in enumerate(seen) if h.replies],
        }

    async def reward(self, name: str, request: Request) -> Json:
        self.admit(request, name)
        reward, task = _outcome(await _json(request))
        self._check_journal()
        if name in self._finishing:
            raise ApiError(409, "episode_finished", f"episode {name!r} is being finished")
        known = self._ledger.reward(name)
        if known is None:
            await self._finish(name, reward, task)
        elif known != reward:
            raise ApiError(409, "episode_finished", f"episode {name!r} is finished already, with reward {known}")
        return {"episode": name, "finished": True, "reward": reward}  # again, for a client that asks again

    async def _finish(self, name: str, reward: float, task: str | None) -> None:
        self._finishing.add(name)  # no new calls
        try:
            while flights := self._flights.get(name):
                await asyncio.wait([flight.task for flight in flights])
            if not self._ledger.calls(name):
                raise _no_episode(name)
            await self._durable(self._ledger.finish(name, reward, task))
            self._finished.set()
        finally:
            self._finishing.discard(name)

    async def complete(self, name: str, request: Request, chat: bool) -> Response:
        self.admit(request, name)
        question = asked(await _json(request), chat)
        self.check_model(question.model)
        self._check_journal()
        if self._ledger.reward(name) is not None or name in self._finishing:
            raise ApiError(409, "episode_finished", f"episode {name!r} is finished: its reward has come")
        flight = self._take_off(name, question)
        if not await unless_gone(request, flight.something() if question.stream else asyncio.wait([flight.task])):
            flight.hang_up()
            return Response(status_code=499)  # to nobody
        headers = _drift_header(flight.history)
        if flight.task.done() and flight.task.exception():
            await flight.task  # raises
        if question.stream:
            return Events(flight, self._stream(flight, request), headers)
        completion = await flight.task
        if completion.stop is StopReason.ABORTED:
            raise _engine_stopped(flight)
        return JSONResponse(self._answer(flight).body(*self._said(flight, completion)), headers=headers)

    # One call

    def _take_off(self, name: str, question: Asked) -> Flight:
        flight = Flight(name, self._ledger.number(), question)
        group = self._flights.setdefault(name, set())
        group.add(flight)

        def landed(_: object) -> None:
            group.discard(flight)
            if not group and self._flights.get(name) is group:
                del self._flights[name]

        flight.begin(self._fly(flight))
        flight.task.add_done_callback(landed)
        return flight

    async def _fly(self, flight: Flight) -> Completion:
        """Prompt to ids, ids to the engine, what it sampled to the journal."""
        loop = asyncio.get_running_loop()
        earlier = self._ledger.calls(flight.episode)
        flight.prompt, flight.history = await loop.run_in_executor(self._reader, self._read, flight.asked, earlier)
        if flight.history.drifted:
            log.warning(
                "%s: %d of %d earlier replies came back as other ids than were sampled, first at position %d",
                flight.name, flight.history.drifted, flight.history.replies, flight.history.first,
            )  # fmt: skip
        try:
            completion = await flight.submit(self._engine)
        except ValueError as error:
            raise ApiError(400, "refused_by_engine", str(error)) from None
        except Exception as error:
            flight.trouble = " ".join(f"{type(error).__name__}: {error}".split())
            completion = Completion(np.asarray(flight.heard, np.int32), None, StopReason.ABORTED, self._engine.version)
        if flight.hung_up:
            log.warning("%s: the client hung up after %d tokens", flight.name, len(completion.tokens))
            completion = Completion(
                completion.tokens, completion.logprobs, StopReason.ABORTED, completion.policy_version
            )
        if len(completion.tokens):
            await self._durable(self._ledger.add(self._recorded(flight, completion)))
        return completion

    def _read(self, question: Asked, earlier: list[Recorded]) -> tuple[list[int], History]:
        """The prompt's ids, and what they hold of the replies before. Runs in the tokenizer's thread."""
        tokenizer = self._engine.tokenizer
        for r in earlier:
            if r not in self._replies:
                self._replies[r] = reply_of(tokenizer, r.call.completion, r.shown)
        replies = [self._replies[r] for r in earlier]
        if not question.chat:
            prompt = question.prompt
            ids = encode(tokenizer, prompt, special=True) if isinstance(prompt, str) else list(prompt)
        elif getattr(tokenizer, "chat_template", None) is None:
            raise ApiError(400, "no_chat_template", "this model has no chat template: use /v1/completions", "messages")
        else:
            try:
                ids = chat_ids(tokenizer, question.messages, replies)
            except Exception as error:  # templates raise what they like
                message = f"the chat template refuses these messages: {error}"
                raise ApiError(400, "chat_template", message, "messages") from None
        if not ids:
            raise ApiError(400, "empty_prompt", "the prompt has no token", "prompt")
        return ids, drift(tokenizer, ids, replies)

    def _recorded(self, flight: Flight, completion: Completion) -> Recorded:
        question = flight.asked
        call = Call(
            np.asarray(flight.prompt, np.int32),
            completion.tokens,
            completion.logprobs,
            completion.stop,
            policy_version=completion.policy_version,
            name=flight.name,
        )
        shown = len(self._visible(flight, completion))
        return Recorded(
            flight.episode, flight.number, call, question.sampling, question.seed,
            flight.started, time.time(), shown, flight.history,
        )  # fmt: skip

    async def _durable(self, future: Any) -> None:
        try:
            await asyncio.wrap_future(future)
        except JournalError as error:
            raise ApiError(503, "not_recorded", str(error)) from None

    # Its answer

    def _answer(self, flight: Flight) -> Answer:
        kind = "chatcmpl" if flight.asked.chat else "cmpl"
        return Answer(f"{kind}-{flight.episode}-{flight.number}", flight.asked, flight.prompt)

    def _visible(self, flight: Flight, completion: Completion) -> str:
        return visible(self._engine.tokenizer, completion.tokens, flight.asked.stop, flight.asked.keep_stop)

    def _said(self, flight: Flight, completion: Completion) -> tuple[str, str, list[int], Json | None]:
        """Text, finish reason, ids, log-probabilities."""
        ids = completion.tokens.tolist()
        logprobs = None
        if flight.asked.logprobs and completion.logprobs is not None:
            tokens = [self._engine.tokenizer.decode([id]) for id in ids]
            logprobs = logprobs_of(tokens, completion.logprobs.tolist(), flight.asked.chat)
        return self._visible(flight, completion), str(completion.stop), ids, logprobs

    async def _stream(self, flight: Flight, request: Request) -> AsyncIterator[str]:
        """Server-sent events. The last ones wait for the journal."""
        answer = self._answer(flight)
        question = flight.asked
        unfolding = Unfolding(self._engine.tokenizer, question.stop, question.keep_stop)
        seen = 0
        try:
            yield _event(answer.opening())
            while not flight.task.done():
                flight.news.clear()
                news = flight.heard[seen:]
                seen += len(news)  # not all of `heard`: the engine's thread may have said more meanwhile
                if piece := unfolding.feed(news):
                    yield _event(answer.chunk(piece))
                if len(flight.heard) == seen and not flight.task.done():
                    await flight.news.wait()
            completion = await flight.task
            if completion.stop is StopReason.ABORTED:
                raise _engine_stopped(flight)
            whole, finish, ids, logprobs = self._said(flight, completion)
            for chunk in answer.closing(unfolding.end(whole), finish, ids, logprobs):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        except ApiError as error:  # too late for a status
            _log_failure(request, error)
            yield _event(error.body())


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _no_episode(name: str) -> ApiError:
    return ApiError(404, "no_such_episode", f"episode {name!r} has no recorded call")


def _engine_stopped(flight: Flight) -> ApiError:
    message = "the engine stopped before the end; what it sampled is recorded as aborted"
    return ApiError(503, "engine_stopped", message, cause=flight.trouble)


def _drift_header(history: History) -> dict[str, str]:
    if not history.replies:
        return {}
    where = "" if history.first is None else f"; first={history.first}"
    return {_DRIFT_HEADER: f"replies={history.replies}; drifted={history.drifted}{where}"}


def _log_failure(request: Request, error: ApiError) -> None:
    """Which route failed and why, in one line and in our words alone: a prompt could be anywhere else."""
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
        raise ApiError(400, "hung_up", "the body did not come to its end") from None
    try:
        body: object = json.loads(b"".join(chunks))
    except (ValueError, RecursionError):
        raise ApiError(400, "invalid_json", "the body is not JSON") from None
    return body


def _outcome(body: object) -> tuple[float, str | None]:
    if not isinstance(body, dict) or not body.keys() <= {"reward", "task"}:
        raise ApiError(400, "invalid_request", 'the body must be like {"reward": 1.0}, and may have a "task"')
    reward = number("reward", body.get("reward"))
    return reward, None if body.get("task") is None else text("task", body["task"])
