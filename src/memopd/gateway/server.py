"""A recording gateway between agents that use OpenAI's API and any engine.

You change an agent's base URL to `/episodes/NAME/v1` and nothing else. `POST /episodes/NAME/reward` ends the episode.
Before an answer ends, the journal has the ids that the model read and sampled.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from weakref import WeakKeyDictionary

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from memopd.engine.protocol import Completion, LiveEngine
from memopd.engine.stops import vocabulary_bytes
from memopd.gateway import TOKEN
from memopd.gateway.calls import EventStream, RunningCall, until_disconnect
from memopd.gateway.drift import History, Reply, drift, reply_of
from memopd.gateway.episodes import Ledger, Recorded
from memopd.gateway.openai_api import (
    ApiError,
    ChatRequest,
    Completed,
    CompletionRequest,
    GenerationRequest,
    Json,
    Outcome,
    parse,
)
from memopd.gateway.text import StreamedText, visible_text
from memopd.http import Guard, Refusal, check_listener
from memopd.record.journal import JournalError
from memopd.types import Call, Sampling, StopReason

log = logging.getLogger(__name__)

MAX_BODY = 16 << 20
_NAME = re.compile(r"[\w.:@+=,~-]{1,200}")  # an episode's name, which is part of a path and of log lines
_DRIFT_HEADER, _TRAINING_HEADER = "x-memopd-drift", "x-memopd-training"
_TOKENIZERS = 3  # prompts that are encoded at once: a long one must not hold up the other sessions


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
    gateway = _Gateway(engine, Ledger(store), model, store_delay)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.stop()

    def refusal(scope: Scope, refused: Refusal) -> Json:
        error = ApiError(refused.status, refused.code, refused.message)
        _log_failure(Request(scope), error)
        return error.body()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, host=host, token=token, answer=refusal)

    @app.post("/episodes/{name}/v1/chat/completions")
    async def chat(name: str, request: Request) -> Response:
        return await gateway.complete(name, request, ChatRequest)

    @app.post("/episodes/{name}/v1/completions")
    async def completions(name: str, request: Request) -> Response:
        return await gateway.complete(name, request, CompletionRequest)

    @app.get("/episodes/{name}/v1/models")
    async def models(name: str) -> Json:
        check_name(name)
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "memopd"}]}

    @app.get("/episodes/{name}/v1/models/{wanted:path}")
    async def one_model(name: str, wanted: str) -> Json:
        check_name(name)
        gateway.check_model(wanted)
        return {"id": model, "object": "model", "created": 0, "owned_by": "memopd"}

    @app.post("/episodes/{name}/reward")
    async def reward(name: str, request: Request) -> Json:
        return await gateway.reward(name, request)

    @app.get("/episodes/{name}")
    async def summary(name: str) -> Json:
        check_name(name)
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
        """The route does not exist, or does not accept this method."""
        return await refused(request, ApiError(error.status_code, "unknown_route", str(error.detail)))

    return app


class _Gateway:
    def __init__(self, engine: LiveEngine, ledger: Ledger, model: str, store_delay: float) -> None:
        self._engine, self._ledger, self._model, self._store_delay = engine, ledger, model, store_delay
        self._max_length = getattr(engine, "max_length", None)  # an engine of your own may not have it
        longest = max(map(len, vocabulary_bytes(engine.tokenizer, len(engine.tokenizer))), default=1)
        self._max_bytes = None if self._max_length is None else self._max_length * longest
        self._running: dict[str, set[RunningCall]] = {}
        self._finishing: set[str] = set()
        self._finished = asyncio.Event()  # set while finished episodes are not in the store yet
        self._compactor: asyncio.Task[None] | None = None
        # Threads, because the event loop must not wait. A tokenizer is not thread-safe, so each thread has a copy; the
        # copies are made here, because copying a large one stops all threads for a second.
        self._local = threading.local()
        copies = [deepcopy(engine.tokenizer) for _ in range(_TOKENIZERS)]
        self._tokenizing = ThreadPoolExecutor(
            _TOKENIZERS, "tokenizer", lambda: setattr(self._local, "tokenizer", copies.pop())
        )
        self._replies: WeakKeyDictionary[Recorded, Reply] = WeakKeyDictionary()  # a cache of the decoded completions

    # Start and stop

    def start(self) -> None:
        if self._ledger.waiting:
            self._finished.set()
        self._compactor = asyncio.create_task(self._compact_forever())

    async def stop(self) -> None:
        """Record running calls as aborted, and write finished episodes to the store."""
        for call in (calls := [call for group in self._running.values() for call in group]):
            call.cancel()
        if calls:  # wait no longer for an engine that does not respond
            await asyncio.wait([call.task for call in calls], timeout=10)
        if self._compactor:
            self._compactor.cancel()
            await asyncio.wait([self._compactor])
        await asyncio.to_thread(self._compact)
        self._ledger.close()
        self._tokenizing.shutdown()

    async def _compact_forever(self) -> None:
        while True:
            await self._finished.wait()
            await asyncio.sleep(self._store_delay)
            self._finished.clear()
            await asyncio.to_thread(self._compact)
            if self._ledger.waiting:  # writing failed, or another episode finished meanwhile
                self._finished.set()

    def _compact(self) -> None:
        try:
            self._ledger.compact()
        except (ValueError, OSError) as error:  # nothing is lost: the journal still has the episodes
            log.error("finished episodes are not in the store yet: %s", error)

    # Routes

    def check_model(self, name: str) -> None:
        if name != self._model:
            message = f"there is no model {name[:60]!r}, only {self._model!r}"
            raise ApiError(404, "model_not_found", message, "model")

    def _check_journal(self) -> None:
        """Refuse a request that could not be recorded."""
        if broken := self._ledger.broken:
            raise ApiError(503, "not_recorded", str(broken))

    def health(self) -> Response:
        opened, finished = self._ledger.counts
        running = sum(map(len, self._running.values()))
        state = {"model": self._model, "policy_version": self._engine.version}
        state |= {"open": opened, "finished": finished, "running": running}
        if broken := self._ledger.broken:
            return JSONResponse({"status": str(broken)} | state, 503)
        return JSONResponse({"status": "ok"} | state)

    def summary(self, name: str) -> Json:
        reward, recorded = self._ledger.reward(name), self._ledger.calls(name)
        if reward is None and not recorded:
            raise _no_episode(name)
        histories = [r.history for r in recorded]
        return {
            "episode": name,
            "finished": reward is not None,
            "reward": reward,
            "stored": reward is not None and not recorded,  # then only the store has its calls
            "running": len(self._running.get(name, ())),
            "calls": len(recorded),
            "aborted": sum(r.call.stop is StopReason.ABORTED for r in recorded),
            "prompt_tokens": sum(len(r.call.prompt) for r in recorded),
            "completion_tokens": sum(len(r.call.completion) for r in recorded),
            "drift": [{"call": t} | asdict(h) for t, h in enumerate(histories) if h.replies],
        }

    async def reward(self, name: str, request: Request) -> Json:
        check_name(name)
        outcome = parse(Outcome, await _json(request))
        self._check_journal()
        if name in self._finishing:
            raise ApiError(409, "episode_finished", f"episode {name!r} is being finished")
        known = self._ledger.reward(name)
        if known is None:
            await self._finish(name, outcome)
        elif known != outcome.reward:
            raise ApiError(409, "episode_finished", f"episode {name!r} is already finished, with reward {known}")
        return {"episode": name, "finished": True, "reward": outcome.reward}  # also if the client repeats the request

    async def _finish(self, name: str, outcome: Outcome) -> None:
        self._finishing.add(name)  # refuses new calls
        try:
            while calls := self._running.get(name):
                await asyncio.wait([call.task for call in calls])
            if not self._ledger.calls(name):
                raise _no_episode(name)
            await self._durable(self._ledger.finish(name, outcome.reward, outcome.task))
            self._finished.set()
        finally:
            self._finishing.discard(name)

    async def complete(self, name: str, request: Request, shape: type[GenerationRequest]) -> Response:
        check_name(name)
        asked = parse(shape, await _json(request))
        self.check_model(asked.model)
        self._check_bytes(sum(map(len, asked.texts())))  # characters: never more than bytes, and known at once
        self._check_journal()
        if self._ledger.reward(name) is not None or name in self._finishing:
            raise ApiError(409, "episode_finished", f"episode {name!r} is finished: it has its reward")
        call = self._start_call(name, asked)
        if not await until_disconnect(request, call.first_token() if asked.stream else asyncio.wait([call.task])):
            call.cancel()
            return Response(status_code=499)  # nobody receives it; 499 is nginx's status for a closed connection
        if call.task.cancelled():
            raise ApiError(503, "stopping", "the gateway stops")
        headers = _drift_header(call.history) | _training_header(call.sampling)
        if call.task.done() and call.task.exception():
            await call.task  # raises
        if asked.stream:
            return EventStream(call, self._stream(call, request), headers)
        completion = await call.task
        if completion.stop is StopReason.ABORTED:
            raise _engine_stopped(call)
        return JSONResponse(call.answer().body(self._completed(call, completion)), headers=headers)

    # One call

    def _start_call(self, name: str, asked: GenerationRequest) -> RunningCall:
        call = RunningCall(name, self._ledger.next_number(), asked)
        group = self._running.setdefault(name, set())
        group.add(call)

        def remove(_: object) -> None:
            group.discard(call)
            if not group and self._running.get(name) is group:
                del self._running[name]

        call.start(self._run_call(call))
        call.task.add_done_callback(remove)
        return call

    async def _run_call(self, call: RunningCall) -> Completion:
        """Encode the prompt, sample from the engine, and record the completion."""
        loop = asyncio.get_running_loop()
        earlier = self._ledger.calls(call.episode)
        self._note_sampling(call, earlier)
        call.prompt, call.history = await loop.run_in_executor(self._tokenizing, self._prompt, call.request, earlier)
        if call.history.drifted:
            log.warning(
                "%s: %d of %d earlier replies came back as other ids than were sampled, first at position %d",
                call.name, call.history.drifted, call.history.replies, call.history.first,
            )  # fmt: skip
        try:
            completion = await call.submit(self._engine)
        except ValueError as error:
            raise ApiError(400, "refused_by_engine", str(error)) from None
        except Exception as error:
            call.failure = " ".join(f"{type(error).__name__}: {error}".split())
            completion = Completion(np.asarray(call.tokens, np.int32), None, StopReason.ABORTED, self._engine.version)
        if call.cancelled:
            log.warning("%s: the client hung up after %d tokens", call.name, len(completion.tokens))
            completion = replace(completion, stop=StopReason.ABORTED)
        if len(completion.tokens):
            await self._durable(self._ledger.add(self._recorded(call, completion)))
        return completion

    def _note_sampling(self, call: RunningCall, earlier: list[Recorded]) -> None:
        """Say at the first call of an episode that is sampled so, not at its end, what training will ask of it."""
        note = call.sampling.training_note
        others = [*(r.sampling for r in earlier), *(c.sampling for c in self._running[call.episode] if c is not call)]
        if note and note not in [sampling.training_note for sampling in others]:
            log.warning("%s: %s", call.name, note)

    def _check_bytes(self, size: int) -> None:
        """Refuse a text that is too long whatever its tokens are, before a tokenizer spends seconds on it."""
        if self._max_bytes is not None and size > self._max_bytes:
            most = f"{self._max_length} tokens have at most {self._max_bytes} bytes"
            raise ApiError(400, "context_length_exceeded", f"the prompt is longer than the model's context: {most}")

    def _prompt(self, asked: GenerationRequest, earlier: list[Recorded]) -> tuple[list[int], History]:
        """The prompt's ids, and which earlier replies they repeat. Runs in a thread of the tokenizers."""
        tokenizer = self._local.tokenizer
        for r in earlier:
            if r not in self._replies:
                self._replies[r] = reply_of(tokenizer, r.call.completion, r.shown)
        replies = [self._replies[r] for r in earlier]
        ids = asked.prompt_ids(tokenizer, replies, lambda text: self._check_bytes(len(text.encode())))
        if not ids:
            raise ApiError(400, "empty_prompt", "the prompt has no tokens", "prompt")
        if self._max_length is not None and len(ids) >= self._max_length:
            return ids, History()  # the engine will refuse it, and the comparison would take long
        return ids, drift(tokenizer, ids, replies)

    def _recorded(self, call: RunningCall, completion: Completion) -> Recorded:
        recorded = Call(
            np.asarray(call.prompt, np.int32),
            completion.tokens,
            completion.logprobs,
            completion.stop,
            policy_version=completion.policy_version,
            name=call.name,
        )
        shown = len(self._visible(call, completion))
        return Recorded(
            call.episode, call.number, recorded, call.sampling, call.request.seed,
            call.started, time.time(), shown, call.history,
        )  # fmt: skip

    async def _durable(self, future: Any) -> None:
        try:
            await asyncio.wrap_future(future)
        except JournalError as error:
            raise ApiError(503, "not_recorded", str(error)) from None

    # The answer to a call

    def _visible(self, call: RunningCall, completion: Completion) -> str:
        asked = call.request
        return visible_text(self._engine.tokenizer, completion.tokens, asked.stop, asked.include_stop_str_in_output)

    def _completed(self, call: RunningCall, completion: Completion) -> Completed:
        ids = completion.tokens.tolist()
        logprobs = None
        if call.request.logprobs and completion.logprobs is not None:
            tokens = [self._engine.tokenizer.decode([id]) for id in ids]
            logprobs = list(zip(tokens, completion.logprobs.tolist(), strict=True))
        return Completed(self._visible(call, completion), str(completion.stop), ids, logprobs)

    async def _stream(self, call: RunningCall, request: Request) -> AsyncIterator[str]:
        """Yield server-sent events. The last ones come after the call is in the journal."""
        asked, answer = call.request, call.answer()
        text = StreamedText(self._engine.tokenizer, asked.stop, asked.include_stop_str_in_output)
        seen = 0
        try:
            yield _event(answer.opening())
            while not call.task.done():
                call.progress.clear()
                new = call.tokens[seen:]
                seen += len(new)  # not len(call.tokens): the engine's thread may have added tokens meanwhile
                if piece := text.feed(new):
                    yield _event(answer.chunk(piece))
                if len(call.tokens) == seen and not call.task.done():
                    await call.progress.wait()
            completion = await call.task
            if completion.stop is StopReason.ABORTED:
                raise _engine_stopped(call)
            completed = self._completed(call, completion)
            for chunk in answer.closing(text.end(completed.text), completed):
                yield _event(chunk)
            yield "data: [DONE]\n\n"
        except ApiError as error:  # the status has been sent already
            _log_failure(request, error)
            yield _event(error.body())


def check_name(episode: str) -> None:
    if not _NAME.fullmatch(episode):
        message = "an episode's name must be 1 to 200 letters, digits and . _ : @ + = , ~ -"
        raise ApiError(400, "invalid_name", message)


def _event(body: Json) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _no_episode(name: str) -> ApiError:
    return ApiError(404, "no_such_episode", f"episode {name!r} has no recorded call")


def _engine_stopped(call: RunningCall) -> ApiError:
    message = "the engine stopped before the end; the tokens sampled so far are recorded as an aborted call"
    return ApiError(503, "engine_stopped", message, cause=call.failure)


def _drift_header(history: History) -> dict[str, str]:
    if not history.replies:
        return {}
    where = "" if history.first is None else f"; first={history.first}"
    return {_DRIFT_HEADER: f"replies={history.replies}; drifted={history.drifted}{where}"}


def _training_header(sampling: Sampling) -> dict[str, str]:
    return {_TRAINING_HEADER: note} if (note := sampling.training_note) else {}


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
