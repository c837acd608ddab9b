"""Agents that speak OpenAI's API, recorded: what was read and what was sampled, as ids, and what was refused."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from gateway_parts import MODEL, Scripted, client, encode, letters, serving, tokenizer, until, user

from memopd.engine.stops import vocabulary_bytes
from memopd.gateway import drift, prompt
from memopd.gateway import server as module
from memopd.record import journal, read_episodes
from memopd.types import Sampling, StopReason

EOS = tokenizer().eos_token_id
JSON = {"content-type": "application/json"}
SAID = "the river flows past the old town"


def template(*messages: dict[str, str]) -> list[int]:
    return encode(tokenizer().apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))


def finish(url: str, episode: str, reward: float = 1.0, **rest: str) -> httpx.Response:
    return httpx.post(f"{url}/episodes/{episode}/reward", json={"reward": reward, **rest}, timeout=30)


def stored(store: Path, count: int = 1) -> list:
    until(lambda: list(store.glob("*.parquet")) and len(list(read_episodes(store))) >= count)
    return list(read_episodes(store))


def lines(caplog) -> list[str]:
    """Our log, without what the HTTP clients say."""
    return [r.getMessage() for r in caplog.records if not r.name.startswith(("http", "openai"))]


# The official client.


def test_a_chat_is_answered_and_recorded(tmp_path):
    engine = Scripted(lambda request: SAID)
    with serving(engine, tmp_path) as url:
        answer = client(url, "e1").chat.completions.create(
            model=MODEL, messages=[user("where is the town?")], temperature=0.7, max_tokens=50, seed=11
        )
        assert answer.choices[0].message.content == SAID
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.prompt_tokens == len(template(user("where is the town?")))
        assert answer.usage.completion_tokens == len(encode(SAID)) + 1
        assert [model.id for model in client(url, "e1").models.list()] == [MODEL]
        assert client(url, "e1").models.retrieve(MODEL).id == MODEL
        assert finish(url, "e1", 0.5, task="task-7").json() == {"episode": "e1", "finished": True, "reward": 0.5}
        (episode,) = stored(tmp_path)
    assert (episode.id, episode.task_id, episode.reward, episode.seed) == ("e1", "task-7", 0.5, 11)
    assert episode.sampling == Sampling(temperature=0.7, max_tokens=50)
    assert episode.started < episode.ended
    (call,) = episode.calls
    assert call.prompt.tolist() == template(user("where is the town?"))
    assert call.completion.tolist() == [*encode(SAID), EOS]
    np.testing.assert_array_equal(call.logprobs, -np.arange(1, len(call.completion) + 1) / 8)
    assert (call.stop, call.policy_version, call.trainable) == (StopReason.STOP, 3, True)
    (request,) = engine.requests
    assert (request.seed, request.episode, request.sampling) == (11, "e1", episode.sampling)


@pytest.mark.parametrize("prompt", ["the old town", encode("the old town"), ["the old town"], [encode("the old town")]])
def test_completions_take_text_or_ids(tmp_path, prompt):
    with serving(Scripted(lambda request: SAID), tmp_path) as url:
        create = client(url, "e1").completions.create
        answer = create(model=MODEL, prompt=prompt, max_tokens=4, logprobs=0, extra_body={"return_token_ids": True})
        (choice,) = answer.choices
        assert choice.text == tokenizer().decode(encode(SAID)[:4])
        assert choice.finish_reason == "length"
        assert choice.model_extra["prompt_token_ids"] == encode("the old town")
        assert choice.model_extra["token_ids"] == encode(SAID)[:4]
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs == [-0.125, -0.25, -0.375, -0.5]
        assert create(model=MODEL, prompt=prompt).usage.completion_tokens == len(encode(SAID)) + 1  # 16 at most
        assert finish(url, "e1").status_code == 200
        (episode,) = stored(tmp_path)
    assert [call.prompt.tolist() for call in episode.calls] == [encode("the old town")] * 2
    assert episode.calls[0].stop is StopReason.LENGTH


WORDS = "naïve café, 東京 🙂 the </search> town"


STOPS = [[], ["</search>"], ["absent", " the", "東"], ["n"]]
SAYINGS = [encode(WORDS), letters(WORDS), [*encode(WORDS), EOS], [200, 150, 250, *encode("x")]]  # the last: no UTF-8


def test_a_stream_says_what_an_answer_says(tmp_path):
    said: list[int] = []
    with serving(Scripted(lambda request: said, pace=0.001), tmp_path) as url:
        c = client(url, "e1")
        for said, stop, keep in product(SAYINGS, STOPS, [False, True]):
            extra = {"include_stop_str_in_output": keep}
            rest = {"model": MODEL, "stop": stop, "max_tokens": 100, "extra_body": extra}
            text = c.completions.create(prompt="town", **rest).choices[0].text
            chunks = list(c.completions.create(prompt="town", stream=True, **rest))
            assert "".join(chunk.choices[0].text for chunk in chunks) == text
            assert chunks[-1].choices[0].finish_reason == "stop"
            chat = list(c.chat.completions.create(messages=[user("town")], stream=True, **rest))
            assert "".join(chunk.choices[0].delta.content for chunk in chat) == text
            assert chat[0].choices[0].delta.role == "assistant"
            if not stop and said[-1] == EOS:
                assert text == WORDS
                assert len(chunks) > 5
            if stop == ["</search>"] and len(said) > 5:
                assert text == WORDS[: WORDS.index("</search>") + 9 * keep]


def test_a_stream_has_usage_log_probabilities_and_ids_at_its_end(tmp_path):
    with serving(Scripted(lambda request: SAID), tmp_path) as url:
        *chunks, last, usage = client(url, "e1").chat.completions.create(
            model=MODEL, messages=[user("town")], stream=True, stream_options={"include_usage": True}, logprobs=True,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        ids = [*encode(SAID), EOS]
        assert usage.usage.completion_tokens == len(ids)
        assert usage.choices == []
        assert chunks[0].model_extra["prompt_token_ids"] == template(user("town"))
        assert last.choices[0].model_extra["token_ids"] == ids
        content = last.choices[0].logprobs.content
        assert [c.logprob for c in content] == [-(n + 1) / 8 for n in range(len(ids))]
        assert "".join(c.token for c in content[:-1]) == SAID
        with httpx.stream(
            "POST", f"{url}/episodes/e1/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as raw:
            assert raw.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in raw.iter_lines() if line]
        assert all(line.startswith("data: {") for line in lines[:-1])
        assert lines[-1] == "data: [DONE]"


# Histories that come back.


def test_a_reply_that_comes_back_keeps_its_sampled_ids(tmp_path, caplog):
    """Sampled letter by letter, as encoding it never would: the second prompt must still read those letters."""
    with serving(Scripted(lambda request: [*letters(SAID), EOS]), tmp_path) as url:
        create = client(url, "e1").chat.completions.with_raw_response.create
        messages = [{"role": "system", "content": "be brief"}, user("where?")]
        for _ in range(3):
            raw = create(model=MODEL, messages=messages)
            reply = raw.parse().choices[0].message
            messages += [reply.model_dump(), user("and then?")]
        assert raw.headers["x-memopd-drift"] == "replies=2; drifted=0"
        assert finish(url, "e1").status_code == 200
        (episode,) = stored(tmp_path)
    first, second, third = episode.calls
    for before, after in ((first, second), (second, third)):
        path = [*before.prompt, *before.completion]
        assert after.prompt[: len(path)].tolist() == path
        assert tokenizer().decode(after.prompt).endswith("and then?<|im_end|>\n<|im_start|>assistant\n")
    assert "came back" not in caplog.text


def test_drift_is_reported_where_it_begins(tmp_path, caplog):
    said = letters("the old town") + encode(" and the river")
    with serving(Scripted(lambda request: [*said, EOS]), tmp_path) as url, caplog.at_level(logging.WARNING):
        create = client(url, "e1").chat.completions.with_raw_response.create
        create(model=MODEL, messages=[user("where?")])
        raw = create(model=MODEL, messages=[user("you said: the old town and the river. Where?")])
        header = raw.headers["x-memopd-drift"]
        summary = httpx.get(f"{url}/episodes/e1").json()
        assert finish(url, "e1").status_code == 200
        (episode,) = stored(tmp_path)
    prompt = episode.calls[1].prompt.tolist()
    assert prompt == template(user("you said: the old town and the river. Where?"))  # as the model read it
    position = int(header.split("first=")[1])
    assert header == f"replies=1; drifted=1; first={position}"
    assert tokenizer().decode(prompt[:position]).endswith("you said:")
    assert summary["drift"] == [{"call": 1, "replies": 1, "drifted": 1, "first": position}]
    assert summary["calls"] == 2
    assert not summary["finished"]
    drifted = "1 of 1 earlier replies came back as other ids than were sampled"
    assert lines(caplog) == [f"episode e1: call 1: {drifted}, first at position {position}"]


# What is honoured, and what is refused.


def ask(url: str, path: str = "chat/completions", episode: str = "e1", **body: object) -> httpx.Response:
    asked = {"model": MODEL, "messages": [user("secret words")]} if path.startswith("chat") else {"model": MODEL}
    body = {name: value for name, value in (asked | body).items() if value is not ...}
    return httpx.post(f"{url}/episodes/{episode}/v1/{path}", json=body, timeout=30)


REFUSED = [
    ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # by the template
    ("chat/completions", {"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "secret"}}}, "tool_choice"),
    ("chat/completions", {"chat_template_kwargs": {"chat_template": "secret"}}, "chat_template_kwargs"),
    ("chat/completions", {"n": 2}, "n"),
    ("chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format"),
    ("chat/completions", {"presence_penalty": 0.5}, "presence_penalty"),
    ("chat/completions", {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ("chat/completions", {"temperature": -1}, "temperature"),
    ("chat/completions", {"temperature": "hot"}, "temperature"),
    ("chat/completions", {"temperature": 10**400}, "temperature"),
    ("chat/completions", {"top_p": 0}, "top_p"),
    ("chat/completions", {"top_k": -2}, "top_k"),
    ("chat/completions", {"max_tokens": 0}, "max_tokens"),
    ("chat/completions", {"max_completion_tokens": True}, "max_completion_tokens"),
    ("chat/completions", {"seed": -1}, "seed"),
    ("chat/completions", {"stop": ["a", ""]}, "stop"),
    ("chat/completions", {"stop": 5}, "stop"),
    ("chat/completions", {"stop": ["secret"] * 17}, "stop"),
    ("chat/completions", {"stop": "secret" * 43}, "stop"),
    ("chat/completions", {"stream": "yes"}, "stream"),
    ("chat/completions", {"stream_options": {"include_everything": True}}, "stream_options"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": ...}, "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [user("\ud800")]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": "x", "secret": 1}]}, "messages[0]"),
    ("chat/completions", {"messages": [1] * 9, "stop": [1] * 9}, "stop[0]"),
    ("chat/completions", {"max_tokens": 1 << 31}, "max_tokens"),
    ("chat/completions", {"": 1}, None),
    ("chat/completions", {"model": ...}, "model"),
    ("chat/completions", {"prompt": "x"}, None),
    ("chat/completions", {"a secret field": 1}, None),
    ("completions", {}, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": [1, True]}, "prompt"),
    ("completions", {"prompt": [1, -1]}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
    ("completions", {"prompt": "x", "echo": True}, "echo"),
    ("completions", {"prompt": "x", "best_of": 3}, "best_of"),
]


def test_what_is_not_supported_is_refused_by_name(tmp_path, caplog):
    engine = Scripted(lambda request: SAID)
    with serving(engine, tmp_path) as url, caplog.at_level(logging.WARNING):
        for path, body, field in REFUSED:
            caplog.clear()
            content = json.dumps({"model": MODEL, "messages": [user("secret words")]} | body, default=str)
            if ... in body.values() or path == "completions":
                answer = ask(url, path, **body)
            else:
                answer = httpx.post(f"{url}/episodes/e1/v1/{path}", content=content, headers=JSON)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error"), body
            assert field is None or field in error["message"]
            (line,) = lines(caplog)
            assert line.startswith(f"POST /episodes/e1/v1/{path}: 400 ")
            assert "secret" not in line
        assert engine.requests == []
        assert httpx.get(f"{url}/episodes/e1").status_code == 404


def test_what_asks_for_nothing_is_accepted(tmp_path):
    engine = Scripted(lambda request: SAID)
    with serving(engine, tmp_path) as url:
        answer = ask(
            url, n=1, tools=[], logit_bias=None, presence_penalty=0.0, response_format={"type": "text"}, user="me",
            top_k=-1, stream_options=None, messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        )  # fmt: skip
        assert answer.status_code == 200
    assert engine.requests[0].sampling == Sampling()
    assert engine.requests[0].prompt.tolist() == template(user("hi"))


def test_temperature_0_is_top_k_of_one(tmp_path, caplog):
    """An episode that was sampled in several ways trains on one of them; the other calls stay actions."""
    engine = Scripted(lambda request: SAID)
    with serving(engine, tmp_path) as url, caplog.at_level(logging.WARNING):
        for sampling in ({"temperature": 0}, {"temperature": 0}, {"temperature": 0.5, "top_p": 0.9}, {}):
            assert ask(url, max_tokens=9, **sampling).status_code == 200
        finish(url, "e1")
        assert ask(url, episode="e2", temperature=0, max_completion_tokens=7).status_code == 200
        finish(url, "e2")
        mixed, greedy = stored(tmp_path, 2)
    assert [r.sampling.top_k for r in engine.requests] == [1, 1, 0, 0, 1]
    assert mixed.sampling == Sampling(max_tokens=9)
    assert [call.trainable for call in mixed.calls] == [False, False, False, True]
    assert mixed.actions == mixed.calls
    assert {call.purpose for call in mixed.calls} == {""}
    unusable = "training cannot use it: sampled at temperature 0 (a top-k of 1), not from the whole distribution"
    assert sorted(lines(caplog)) == [
        "episode e1: 3 of 4 calls are context only: the episode was sampled with temperature 1.0, top_p 1.0, top_k 0, "
        "but call 0 with temperature 1.0, top_p 1.0, top_k 1",
        f"episode e1: call 0: {unusable}",  # said at the first call, and not again for the next
        "episode e1: call 2: training cannot use it: sampled with top-p or top-k, not from the whole distribution",
        f"episode e2: call 4: {unusable}",
    ]
    assert greedy.sampling == Sampling(top_k=1, max_tokens=7)  # which training refuses
    assert greedy.calls[0].trainable


def test_what_training_will_say_is_in_a_header(tmp_path, caplog):
    with serving(Scripted(lambda request: SAID), tmp_path) as url, caplog.at_level(logging.WARNING):
        said = [
            ask(url, episode=episode, temperature=temperature, stream=stream).headers.get("x-memopd-training")
            for episode, temperature in (("e1", 1), ("e1", 0.01), ("e1", 0.01), ("e2", 0.01))
            for stream in (False, True)
        ]
    note = "training can use it only with sampling.temperature = 0.01"
    assert said == [None] * 2 + [note] * 6
    assert lines(caplog) == [f"episode e1: call 2: {note}", f"episode e2: call 6: {note}"]


# Prompts that take long to encode.


LONGEST = max(len(text) for text in vocabulary_bytes(tokenizer(), len(tokenizer())))


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_encoded(tmp_path, monkeypatch):
    engine = Scripted(lambda request: SAID)
    engine.max_length = 100
    encoded = []
    for part in (drift, prompt):
        counted = partial(lambda encode, *args, **rest: encoded.append(args[1]) or encode(*args, **rest), part.encode)
        monkeypatch.setattr(part, "encode", counted)
    with serving(engine, tmp_path) as url:
        long, half = "é" * (50 * LONGEST + 1), "é" * (25 * LONGEST)
        for body in (
            {"path": "completions", "prompt": long},  # by its bytes
            {"path": "completions", "prompt": long * 2},  # by its characters
            {"messages": [user(long)]},
            {"messages": [user(half), user(half)]},  # by what the template adds
        ):
            answer = ask(url, **body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
            assert error["message"].endswith(f"100 tokens have at most {100 * LONGEST} bytes")
        assert encoded == []
        assert engine.requests == []
        assert ask(url, "completions", prompt=long[:-1]).status_code == 200  # the engine counts its tokens
        assert encoded == [long[:-1]]


def test_a_prompt_of_the_longest_tokens_is_not_refused(tmp_path):
    vocabulary = vocabulary_bytes(tokenizer(), len(tokenizer()))
    word = next(text for text in vocabulary if len(text) == LONGEST).decode()
    engine = Scripted(lambda request: SAID)
    engine.max_length = 40
    with serving(engine, tmp_path) as url:
        assert ask(url, "completions", prompt=word * 40).status_code == 200
    assert len(engine.requests[0].prompt) == 40


def test_a_slow_prompt_holds_nobody_up_and_a_hang_up_ends_it(tmp_path, monkeypatch):
    """A tokenizer's thread cannot be stopped, but nothing waits for it, and what waits for it is never encoded."""
    go, begun, encode = threading.Event(), [], prompt.encode

    def slow(tokenizer, text, special=False):
        begun.append((text, id(tokenizer)))
        assert not text.startswith("slow") or go.wait(60)
        return encode(tokenizer, text, special)

    monkeypatch.setattr(prompt, "encode", slow)
    engine = Scripted(lambda request: SAID)
    with serving(engine, tmp_path) as url, ThreadPoolExecutor(8) as pool:

        def hang_up(text):
            with pytest.raises(openai.APITimeoutError):
                client(url, "e1", timeout=1.0).completions.create(model=MODEL, prompt=text)

        for n in range(prompt.TOKENIZERS - 1):
            pool.submit(hang_up, f"slow {n}")
        until(lambda: len(begun) == prompt.TOKENIZERS - 1)
        assert ask(url, "completions", episode="e2", prompt="quick").status_code == 200
        last = [pool.submit(hang_up, f"slow {n}") for n in range(10, 13)]  # one of them takes the last thread
        for one in last:
            one.result(60)
        until(lambda: httpx.get(f"{url}/health").json()["running"] == 0)
        go.set()
        assert ask(url, "completions", episode="e2", prompt="quick").status_code == 200
        assert finish(url, "e1").status_code == 404
    assert [text for text, _ in begun].count("quick") == 2
    assert len([text for text, _ in begun if text.startswith("slow")]) == prompt.TOKENIZERS
    assert len({tokenizer for _, tokenizer in begun}) == prompt.TOKENIZERS  # no two threads share one
    assert len(engine.requests) == 2


def test_stop_strings_are_prepared_off_the_event_loop(tmp_path):
    """The engine builds their automaton in `submit`."""
    threads = []
    engine = Scripted(lambda request: threads.append(threading.current_thread().name) or SAID)
    with serving(engine, tmp_path) as url:
        assert ask(url, stop=["x" * 256] * 16).status_code == 200
    assert threads[0].startswith("asyncio")  # the pool of asyncio.to_thread


# Failures: the right status, one line, others untouched.


def test_failures(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(module, "MAX_BODY", 10_000)
    engine = Scripted(lambda request: SAID * 20, pace=0.01)
    key = {"authorization": "Bearer correct"} | JSON
    chat = {"model": MODEL, "messages": [user("secret words")]}
    good = json.dumps(chat).encode()
    with serving(engine, tmp_path, token="correct") as url, caplog.at_level(logging.INFO):
        here = f"{url}/episodes/e1"
        cases = [
            ("POST", f"{here}/v1/chat/completions", {}, good, 401, "invalid_api_key"),
            ("POST", f"{here}/v1/chat/completions", key | {"content-type": "text/plain"}, good, 415, "not_json"),
            ("POST", f"{here}/v1/chat/completions", key | {"host": "secret.example"}, good, 421, "wrong_host"),
            ("POST", f"{here}/v1/chat/completions", key | {"origin": "http://secret"}, good, 403, "foreign_origin"),
            ("POST", f"{here}/v1/chat/completions", {"authorization": "Bearer corre"}, good, 401, "invalid_api_key"),
            ("POST", f"{here}/v1/chat/completions", {"authorization": b"Bearer \xe9"}, good, 401, "invalid_api_key"),
            ("POST", f"{here}/reward", {}, b'{"reward": 1}', 401, "invalid_api_key"),
            ("GET", here, {}, b"", 401, "invalid_api_key"),
            ("GET", f"{here}/v1/models", {}, b"", 401, "invalid_api_key"),
            ("POST", f"{here}/v1/chat/completions", key, b'{"secret words"', 400, "invalid_json"),
            ("POST", f"{here}/v1/chat/completions", key, b"\xff\xfe\xff", 400, "invalid_json"),
            ("POST", f"{here}/v1/chat/completions", key, b"[" * 9000, 400, "invalid_json"),
            ("POST", f"{here}/v1/chat/completions", key, b"[]", 400, "invalid_request"),
            ("POST", f"{here}/v1/chat/completions", key, good + b" " * 10_000, 413, "body_too_large"),
            ("POST", f"{here}/v1/chat/completions", key, good.replace(b"tiny", b"other"), 404, "model_not_found"),
            ("GET", f"{here}/v1/models/other", key, b"", 404, "model_not_found"),
            ("POST", f"{here}/v1/embeddings", key, good, 404, "unknown_route"),
            ("GET", f"{here}/v1/chat/completions", key, b"", 405, "unknown_route"),
            ("POST", f"{url}/episodes/a%20b/v1/chat/completions", key, good, 400, "invalid_name"),
            ("POST", f"{here}/reward", key, b'{"reward": 1}', 404, "no_such_episode"),
            ("POST", f"{here}/reward", key, b'{"reward": NaN}', 400, "invalid_request"),
            ("POST", f"{here}/reward", key, b'{"reward": "1"}', 400, "invalid_request"),
            ("POST", f"{here}/reward", key, b'{"reward": 1, "secret": 2}', 400, "invalid_request"),
            ("GET", f"{url}/episodes/never", key, b"", 404, "no_such_episode"),
        ]
        other = client(url, "other", "correct").chat.completions
        steady = other.create(model=MODEL, messages=[user("go on")], stream=True)
        with httpx.Client() as http:
            for method, address, headers, body, status, code in cases:
                caplog.clear()
                answer = http.request(method, address, headers=headers, content=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (address, body[:40])
                (line,) = lines(caplog)
                assert f": {status} {code}" in line
                assert "secret" not in line
                assert "\n" not in line
            assert http.get(f"{url}/health").json()["running"] == 1
        assert "".join(chunk.choices[0].delta.content for chunk in steady) == SAID * 20
        with pytest.raises(openai.AuthenticationError):
            client(url, "e1", "wrong").chat.completions.create(**chat)
        with pytest.raises(openai.NotFoundError, match="there is no model"):
            client(url, "e1", "correct").chat.completions.create(**chat | {"model": "gpt"})
    assert len(engine.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up(tmp_path, caplog, stream):
    engine = Scripted(lambda request: SAID * 100, pace=0.01)
    with serving(engine, tmp_path) as url, caplog.at_level(logging.INFO):
        steady = client(url, "other").chat.completions.create(
            model=MODEL, messages=[user("go on")], stream=True, max_tokens=60
        )
        if stream:
            chunks = client(url, "e1").chat.completions.create(
                model=MODEL, messages=[user("secret words")], stream=True
            )
            for _ in range(4):
                next(chunks)
            chunks.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client(url, "e1", timeout=0.3).chat.completions.create(model=MODEL, messages=[user("secret words")])
        until(lambda: engine.cancelled)
        until(lambda: httpx.get(f"{url}/episodes/e1").json().get("aborted"))
        (line,) = (line for line in lines(caplog) if not line.startswith("GET"))  # we may have asked too early
        assert "episode e1: call 1: the client hung up after" in line
        assert "".join(c.choices[0].delta.content for c in steady) == tokenizer().decode(encode(SAID * 100)[:60])
        assert ask(url, max_tokens=3).status_code == 200  # the episode goes on
        assert finish(url, "e1").status_code == 200
        (episode,) = stored(tmp_path)
    aborted, whole = episode.calls
    assert aborted.stop is StopReason.ABORTED
    assert not aborted.trainable
    assert 2 <= len(aborted.completion) < 100
    assert aborted.completion.tolist() == encode(SAID * 100)[: len(aborted.completion)]
    assert (len(aborted.logprobs), whole.trainable) == (len(aborted.completion), True)
    assert engine.cancelled == 1


def test_hanging_up_before_anything_was_sampled_leaves_nothing(tmp_path):
    engine = Scripted(lambda request: SAID)
    engine.go.clear()
    with serving(engine, tmp_path) as url:
        for stream in (False, True):
            with pytest.raises(openai.APITimeoutError):
                client(url, "e1", timeout=0.3).completions.create(model=MODEL, prompt="x", stream=stream)
        until(lambda: engine.cancelled == 2)
        until(lambda: httpx.get(f"{url}/health").json()["running"] == 0)
        assert httpx.get(f"{url}/episodes/e1").status_code == 404


def test_an_engine_that_fails_or_refuses(tmp_path, caplog):
    def say(request):
        if len(request.prompt) > 50:
            raise ValueError("too long")
        return [*encode(SAID)[:5], -1]

    with serving(Scripted(say), tmp_path) as url, caplog.at_level(logging.INFO):
        answer = ask(url)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        with pytest.raises(openai.APIError, match="the engine stopped before the end"):
            list(client(url, "e1").completions.create(model=MODEL, prompt="x", stream=True))
        refused = ask(url, messages=[user("secret words" * 50)])
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "too long")
        assert lines(caplog) == [
            "POST /episodes/e1/v1/chat/completions: 503 engine_stopped: RuntimeError: the engine broke",
            "POST /episodes/e1/v1/completions: 503 engine_stopped: RuntimeError: the engine broke",
            "POST /episodes/e1/v1/chat/completions: 400 refused_by_engine",
        ]
        summary = httpx.get(f"{url}/episodes/e1").json()
        assert (summary["calls"], summary["aborted"], summary["completion_tokens"]) == (1, 1, 5)  # what was streamed


# Order, ends, durability.


def holding(question, answer):
    """An engine that answers this question only once `go` is set."""
    engine, held = Scripted(answer), template(user(question))
    engine.held = lambda request: request.prompt.tolist() == held
    engine.go.clear()
    return engine


def test_overlapping_calls_are_ordered_by_arrival_and_the_reward_waits_for_them(tmp_path):
    engine = holding("slowly", lambda request: SAID if engine.held(request) else "town")
    with serving(engine, tmp_path) as url, ThreadPoolExecutor(8) as pool:
        slow = pool.submit(ask, url, messages=[user("slowly")])
        until(lambda: len(engine.requests) == 1)
        assert ask(url).status_code == 200
        assert not slow.done()
        rewarded = pool.submit(finish, url, "e1", 2.0)
        until(lambda: ask(url).status_code == 409)
        assert not slow.done()
        assert not rewarded.done()
        engine.go.set()
        assert slow.result().status_code == 200
        assert rewarded.result().status_code == 200
        assert ask(url).json()["error"]["code"] == "episode_finished"
        (episode,) = stored(tmp_path)
        assert ask(url).status_code == 409
        assert finish(url, "e1", 2.0).status_code == 200  # asked again, it is what it was
        assert finish(url, "e1", 1.0).status_code == 409
        until(lambda: httpx.get(f"{url}/episodes/e1").json()["stored"])
        assert len(list(read_episodes(tmp_path))) == 1
    assert [call.prompt.tolist() for call in episode.calls] == [request.prompt.tolist() for request in engine.requests]
    assert len(episode.calls[0].completion) > len(episode.calls[1].completion)


@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_ends_before_its_record_is_durable(tmp_path, monkeypatch, stream):
    hold, begun, sync = threading.Event(), threading.Event(), journal.os.fdatasync
    with serving(Scripted(lambda request: SAID), tmp_path) as url, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(journal.os, "fdatasync", lambda handle: (begun.set(), hold.wait(20), sync(handle)))
        received: list[str] = []

        def listen():
            body = {"model": MODEL, "messages": [user("town")], "stream": stream}
            with httpx.stream("POST", f"{url}/episodes/e1/v1/chat/completions", json=body, timeout=30) as answer:
                received.extend(answer.iter_lines())

        listening = pool.submit(listen)
        assert begun.wait(20)
        assert not threading.Event().wait(0.3)
        assert not listening.done()
        assert 'finish_reason":"stop' not in "".join(received).replace(" ", "")
        assert "[DONE]" not in "".join(received)
        hold.set()
        listening.result(20)
        assert 'finish_reason":"stop' in "".join(received).replace(" ", "")


def test_the_reward_is_durable_before_its_answer(tmp_path, monkeypatch):
    hold, begun, sync = threading.Event(), threading.Event(), journal.os.fdatasync
    with serving(Scripted(lambda request: SAID), tmp_path) as url, ThreadPoolExecutor(2) as pool:
        assert ask(url).status_code == 200
        monkeypatch.setattr(journal.os, "fdatasync", lambda handle: (begun.set(), hold.wait(20), sync(handle)))
        rewarded = pool.submit(finish, url, "e1")
        assert begun.wait(20)
        assert not threading.Event().wait(0.2)
        assert not rewarded.done()
        repeated = pool.submit(finish, url, "e1")
        assert not threading.Event().wait(0.2)
        assert not repeated.done()  # asked again, it is not there yet
        hold.set()
        assert rewarded.result(20).status_code == 200
        assert repeated.result(20).status_code == 200
        assert finish(url, "e1").status_code == 200


def test_a_reward_that_waits_may_be_repeated_and_not_changed(tmp_path):
    engine = holding("slowly", lambda request: SAID)
    with serving(engine, tmp_path) as url, ThreadPoolExecutor(8) as pool:
        slow = pool.submit(ask, url, messages=[user("slowly")])
        until(lambda: len(engine.requests) == 1)
        rewarded = pool.submit(finish, url, "e1", 2.0, task="t")
        until(lambda: ask(url).status_code == 409)
        repeated = [pool.submit(finish, url, "e1", 2.0, **task) for task in ({}, {"task": "t"})]
        for reward, task in ((1.0, "t"), (2.0, "other")):
            changed = finish(url, "e1", reward, task=task)
            assert (changed.status_code, changed.json()["error"]["code"]) == (409, "episode_finished")
        assert not any(waiting.done() for waiting in (slow, rewarded, *repeated))
        engine.go.set()
        assert [waiting.result(20).status_code for waiting in (slow, rewarded, *repeated)] == [200] * 4
        nobody = [pool.submit(finish, url, "nobody") for _ in range(2)]
        assert [waiting.result(20).status_code for waiting in nobody] == [404] * 2
    (episode,) = read_episodes(tmp_path)
    assert (episode.reward, episode.task_id) == (2.0, "t")


def test_a_repeated_reward_with_another_task_is_refused(tmp_path):
    """Also after a restart, and after the episode's part was moved away."""

    def repeat(url: str) -> None:
        assert finish(url, "e1").status_code == 200
        assert finish(url, "e1", task="t").status_code == 200
        assert finish(url, "e2", task="e2").status_code == 200  # the task of an episode without one
        for name, task in (("e1", "t"), ("e2", "e2")):
            changed = finish(url, name, task="other")
            assert (changed.status_code, changed.json()["error"]["code"]) == (409, "episode_finished")
            assert changed.json()["error"]["message"] == f"episode '{name}' already has the task '{task}'"

    with serving(Scripted(lambda request: SAID), tmp_path) as url:
        assert [ask(url, episode=name).status_code for name in ("e1", "e2")] == [200] * 2
        assert finish(url, "e1", task="t").status_code == 200
        assert finish(url, "e2").status_code == 200
        repeat(url)
    assert [(e.id, e.task_id) for e in read_episodes(tmp_path)] == [("e1", "t"), ("e2", "e2")]
    with serving(Scripted(lambda request: SAID), tmp_path) as url:
        repeat(url)
    for part in tmp_path.glob("*.parquet"):
        part.unlink()
    with serving(Scripted(lambda request: SAID), tmp_path) as url:
        repeat(url)


def test_a_full_disk_is_an_error_not_a_lost_call(tmp_path, monkeypatch, caplog):
    def full(handle):
        raise OSError(28, "No space left on device")

    with serving(Scripted(lambda request: SAID), tmp_path) as url:
        assert ask(url).status_code == 200
        monkeypatch.setattr(journal.os, "fdatasync", full)
        answer = ask(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_recorded")
        monkeypatch.undo()
        assert ask(url).status_code == 503  # until a restart
        assert finish(url, "e1").status_code == 503
        assert finish(url, "e1").status_code == 503
        assert httpx.get(f"{url}/health").status_code == 503
    with serving(Scripted(lambda request: SAID), tmp_path) as url:
        assert ask(url).status_code == 200
        assert httpx.get(f"{url}/health").json() == {
            "status": "ok", "model": MODEL, "policy_version": 3, "open": 1, "finished": 0, "running": 0,
        }  # fmt: skip


def test_a_restart_goes_on_where_it_stopped(tmp_path):
    with serving(Scripted(lambda request: [*letters(SAID), EOS]), tmp_path) as url:
        assert ask(url).status_code == 200
        assert ask(url, episode="done").status_code == 200
        assert finish(url, "done").status_code == 200
    assert [episode.id for episode in read_episodes(tmp_path)] == ["done"]  # a stop writes what is finished
    with serving(Scripted(lambda request: [*letters(SAID), EOS]), tmp_path) as url:
        assert ask(url, episode="done").status_code == 409
        answer = ask(url, messages=[user("secret words"), {"role": "assistant", "content": SAID}, user("go on")])
        assert answer.headers["x-memopd-drift"] == "replies=1; drifted=0"
        assert finish(url, "e1").status_code == 200
    done, continued = read_episodes(tmp_path)
    assert (done.id, continued.id) == ("done", "e1")
    first, second = continued.calls
    assert second.prompt[: len(first.prompt) + len(first.completion)].tolist() == [*first.prompt, *first.completion]
