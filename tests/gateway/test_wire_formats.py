"""One recorder behind three wire formats: the same conversation gives the same ids in each, and the answers are in the
form that each format's clients expect."""

from __future__ import annotations

import json
import logging
from copy import copy
from functools import cache
from pathlib import Path

import httpx
import pytest
from scripted import RESPONSE_TEMPLATE, Scripted, encode, letters, serving, until
from transformers import AutoTokenizer

from memopd.gateway.tools import CLOSE, OPEN
from memopd.record import read_episodes
from memopd.types import Sampling

TOKENIZERS = Path(__file__).parents[3] / "shared" / "tokenizers"
pytestmark = pytest.mark.skipif(not TOKENIZERS.is_dir(), reason="needs the real tokenizers of ../shared/tokenizers")

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "add", "description": "adds", "parameters": PARAMETERS}
CALL = f'{OPEN}\n{{"name": "add", "arguments": {{"a":2}}}}\n{CLOSE}'  # the template would write a space before the 2
SAID = f"I add.\n{CALL}"
TOOLS = {
    "chat/completions": [{"type": "function", "function": FUNCTION | {"strict": True}}],
    "messages": [{"name": "add", "description": "adds", "input_schema": PARAMETERS, "cache_control": {"type": "x"}}],
    "responses": [{"type": "function", **FUNCTION, "strict": True}],
}
FORMATS = list(TOOLS)


@cache
def tokenizer():
    """SmolLM2's, which is small, with Qwen's chat template, which knows tools. test_tool_calls.py has Qwen's own."""
    made = AutoTokenizer.from_pretrained(TOKENIZERS / "smollm2-135m")
    made.chat_template = (TOKENIZERS / "qwen2.5-coder-0.5b" / "chat_template.jinja").read_text()
    return made


class Server:
    """A gateway for several tests of this file: its engine says what a test sets."""

    def __init__(self, tokenizer) -> None:
        self.says: list[str | list[int]] = []
        self.engine = Scripted(lambda request: self.says.pop(0), tokenizer, max_length=4096)
        self.url, self.store, self.episodes = "", Path(), 0

    def episode(self, *says: str | list[int]) -> str:
        self.says, self.episodes = list(says), self.episodes + 1
        self.engine.requests.clear()
        return f"e{self.episodes}"

    def post(self, path: str, name: str, body: dict, **headers: str) -> httpx.Response:
        given = {f"x-memopd-{header}": value for header, value in ({"episode": name} | headers).items()}
        limit = {"max_tokens": 500} if path == "messages" else {}
        return httpx.post(f"{self.url}/v1/{path}", json={"model": "tiny"} | limit | body, headers=given, timeout=30)

    def recorded(self, episode: str):
        assert httpx.post(f"{self.url}/episodes/{episode}/reward", json={"reward": 1}).status_code == 200
        until(lambda: httpx.get(f"{self.url}/episodes/{episode}").json()["stored"])
        return next(e for e in read_episodes(self.store) if e.id == episode)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = Server(tokenizer())
    made.store = tmp_path_factory.mktemp("store")
    with serving(made.engine, made.store) as made.url:
        yield made


def begun(path: str, text: str = "2+2?") -> dict:
    """A first request with a tool."""
    return {"input" if path == "responses" else "messages": [{"role": "user", "content": text}], "tools": TOOLS[path]}


def continued(path: str, body: dict, answer: dict, result: str = "4") -> dict:
    """The request with the answer and the tool's result, as a client of this format sends it back."""
    if path == "chat/completions":
        message = answer["choices"][0]["message"] | {"provider_specific_fields": {"x": 1}}
        results = [{"role": "tool", "tool_call_id": c["id"], "content": result} for c in message["tool_calls"]]
        return body | {"messages": [*body["messages"], message, *results]}
    if path == "messages":
        uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": id, "content": [{"type": "text", "text": result}]} for id in uses
        ]
        turns = [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
        return body | {"messages": [*body["messages"], *turns]}
    calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": id, "output": result} for id in calls]
    return body | {"input": [*body["input"], *answer["output"], *results]}


def parts(path: str, answer: dict) -> tuple[str, list[tuple[str, dict]], str]:
    """The text, the tool calls and the reason to stop."""
    if path == "chat/completions":
        (choice,) = answer["choices"]
        message = choice["message"]
        calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]
        return message["content"] or "", calls, choice["finish_reason"]
    if path == "messages":
        text = "".join(b["text"] for b in answer["content"] if b["type"] == "text")
        return (
            text,
            [(b["name"], b["input"]) for b in answer["content"] if b["type"] == "tool_use"],
            answer["stop_reason"],
        )
    calls = [(i["name"], json.loads(i["arguments"])) for i in answer["output"] if i["type"] == "function_call"]
    text = "".join(i["content"][0]["text"] for i in answer["output"] if i["type"] == "message")
    return text, calls, answer["status"]


STOPPED = {
    "chat/completions": ("tool_calls", "stop"),
    "messages": ("tool_use", "end_turn"),
    "responses": ("completed",) * 2,
}


@pytest.mark.parametrize("path", FORMATS)
@pytest.mark.parametrize("spell", [encode, letters])
def test_a_tool_call_and_its_result(server, path, spell):
    """The next prompt reads the call's sampled ids, however they were spelled, and every call trains."""
    sampled = [*spell(tokenizer(), SAID), tokenizer().eos_token_id]
    episode = server.episode(sampled, "It is 4.")
    body = begun(path)
    first = server.post(path, episode, body)
    assert first.status_code == 200, first.text
    assert parts(path, first.json()) == ("I add.", [("add", {"a": 2})], STOPPED[path][0])
    second = server.post(path, episode, continued(path, body, first.json()))
    assert parts(path, second.json()) == ("It is 4.", [], STOPPED[path][1])
    assert second.headers["x-memopd-drift"] == "replies=1; drifted=0"
    assert second.headers["x-memopd-trainable"] == "true"
    calls = server.recorded(episode).calls
    assert calls[0].completion.tolist() == sampled
    path_read = [*calls[0].prompt, *sampled]
    assert calls[1].prompt[: len(path_read)].tolist() == path_read
    assert (
        tokenizer()
        .decode(calls[1].prompt)
        .endswith("<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    )
    assert all(call.trainable and not call.purpose for call in calls)


def test_the_formats_make_the_same_prompt(server):
    prompts = []
    for path in FORMATS:
        episode = server.episode(SAID, "It is 4.")
        body = begun(path) | ({"system": "Be brief."} if path == "messages" else {})
        if path == "responses":
            body["instructions"] = "Be brief."
        elif path == "chat/completions":
            body["messages"] = [{"role": "developer", "content": "Be brief."}, *body["messages"]]
        server.post(path, episode, continued(path, body, server.post(path, episode, body).json()))
        prompts.append([request.prompt.tolist() for request in server.engine.requests])
    assert prompts[0] == prompts[1] == prompts[2]
    assert tokenizer().decode(prompts[0][0]).startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")


def events(answer: httpx.Response) -> list[dict]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def streamed(path: str, given: list[dict]) -> tuple[str, list[tuple[str, dict]], str]:
    """What a stream says, put together as its clients do."""
    text, names, arguments, reason = "", {}, {}, ""
    for event in given:
        if path == "chat/completions":
            (choice,) = event["choices"]
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                names.setdefault(call["index"], call["function"].get("name"))
                arguments[call["index"]] = arguments.get(call["index"], "") + call["function"]["arguments"]
            reason = choice["finish_reason"] or reason
        elif path == "messages":
            delta = event.get("delta", {})
            text += delta.get("text", "")
            if event.get("content_block", {}).get("type") == "tool_use":
                names[event["index"]] = event["content_block"]["name"]
            if delta.get("type") == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            reason = delta.get("stop_reason") or reason
        elif event["type"] == "response.completed":
            return parts(path, event["response"])
    return text, [(names[n], json.loads(arguments[n])) for n in names], reason


@pytest.mark.parametrize("path", FORMATS)
def test_ids_come_with_the_answer_if_a_client_asks(server, path):
    episode = server.episode(SAID, SAID, SAID)
    body = begun(path)
    assert "token_ids" not in server.post(path, episode, body).text
    whole = server.post(path, episode, body | {"return_token_ids": True}).json()
    given = events(server.post(path, episode, body | {"return_token_ids": True, "stream": True}))
    if path == "messages":
        first, last = given[0]["message"], next(e for e in given if e["type"] == "message_delta")
    else:
        first, last = (given[0], given[-1]) if path == "chat/completions" else [given[-1]["response"]] * 2
    calls = server.recorded(episode).calls
    for call, prompt, said in ((calls[1], whole, whole), (calls[2], first, last)):
        assert prompt["prompt_token_ids"] == call.prompt.tolist()
        assert (said["choices"][0] if "choices" in said else said)["token_ids"] == call.completion.tolist()


BROKEN = f'{OPEN}\n{{"name": "add", "arguments": {{"a":\n{CLOSE}'


@pytest.mark.parametrize("path", FORMATS)
@pytest.mark.parametrize("said", [SAID, CALL, f"{CALL}\n{CALL}", BROKEN, f"So {BROKEN}", "It is 4.", f"{SAID} Then?"])
def test_a_stream_says_what_an_answer_says(server, path, said):
    episode = server.episode(said, said)
    whole = parts(path, server.post(path, episode, begun(path)).json())
    given = events(server.post(path, episode, begun(path) | {"stream": True}))
    assert streamed(path, given) == whole
    assert whole[0] == (
        said if said in (BROKEN, f"So {BROKEN}", "It is 4.") else said.replace("\n" + CALL, "").replace(CALL, "")
    )
    if path == "responses":
        deltas = "".join(e["delta"] for e in given if e["type"] == "response.output_text.delta")
        assert deltas == whole[0]
        assert [e["sequence_number"] for e in given] == list(range(len(given)))
    ids = [call.completion.tolist() for call in server.recorded(episode).calls]
    assert ids == [[*encode(tokenizer(), said), tokenizer().eos_token_id]] * 2  # untouched, well formed or not


@pytest.mark.parametrize(("parallel", "count"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("path", FORMATS)
def test_one_call_at_a_time(server, path, parallel, count):
    episode = server.episode(f"{CALL}\n{CALL}")
    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": not parallel}}
    body = begun(path) | (one if path == "messages" else {"parallel_tool_calls": parallel})
    assert len(parts(path, server.post(path, episode, body).json())[1]) == count


REQUIRED = {
    "chat/completions": ["required", {"type": "function", "function": {"name": "add"}}],
    "messages": [{"type": "any"}, {"type": "tool", "name": "add"}],
    "responses": ["required", {"type": "function", "name": "add"}],
}
OBEDIENT = CALL.replace('"a":2', '"a": 2')


@pytest.mark.parametrize("path", FORMATS)
def test_a_required_call_is_recorded_and_not_trained_on(server, path):
    for choice in REQUIRED[path]:
        episode = server.episode(OBEDIENT, "It is 4.", "It is 4.")
        forced = server.post(path, episode, begun(path) | {"tool_choice": choice})
        assert parts(path, forced.json())[1] == [("add", {"a": 2})]
        assert forced.headers["x-memopd-trainable"] == "false"
        assert forced.headers["x-memopd-training"].startswith("training cannot use it: a grammar restricted its tokens")
        assert (
            server.post(path, episode, begun(path) | {"tool_choice": choice}).status_code == 400
        )  # the script defies it
        none = {"type": "none"} if path == "messages" else "none"
        plain = server.post(path, episode, begun(path) | {"tool_choice": none})
        assert plain.headers["x-memopd-trainable"] == "true"
        assert "add" not in tokenizer().decode(server.engine.requests[-1].prompt)
        assert [call.trainable for call in server.recorded(episode).calls] == [False, True]


IN_JSON = {
    "chat/completions": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}
    },
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}},
}


@pytest.mark.parametrize("path", FORMATS)
def test_an_answer_in_json(server, path):
    episode = server.episode('{"a": 2}', "It is 4.")
    body = begun(path) | {"tools": []} | IN_JSON[path]
    answer = server.post(path, episode, body)
    assert parts(path, answer.json())[0] == '{"a": 2}'
    assert answer.headers["x-memopd-trainable"] == "false"
    assert server.post(path, episode, body).status_code == 400
    assert not server.recorded(episode).calls[0].trainable


@pytest.mark.parametrize("path", FORMATS)
def test_tools_together_with_an_answer_in_json(server, path):
    """The model may call a tool or answer in JSON; where a call is required, it must call."""
    episode = server.episode(OBEDIENT, '{"a": 2}', "It is 4.")
    body = begun(path) | IN_JSON[path]
    called, answered = server.post(path, episode, body), server.post(path, episode, body)
    assert called.status_code == 200, called.text
    assert parts(path, called.json()) == ("", [("add", {"a": 2})], STOPPED[path][0])
    assert parts(path, answered.json()) == ('{"a": 2}', [], STOPPED[path][1])
    assert server.post(path, episode, body).status_code == 400  # the script follows neither
    for required in (body | {"tool_choice": choice} for choice in REQUIRED[path]):
        server.says = [OBEDIENT, '{"a": 2}']
        assert parts(path, server.post(path, episode, required).json())[1] == [("add", {"a": 2})]
        assert server.post(path, episode, required).status_code == 400  # the script does not call
    assert not any(call.trainable for call in server.recorded(episode).calls)


# ---- a tokenizer that reads its own answers ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """A gateway whose tokenizer has a `response_template`."""
    own = copy(tokenizer())
    own.response_template = RESPONSE_TEMPLATE
    made = Server(own)
    made.store = tmp_path_factory.mktemp("store")
    with serving(made.engine, made.store) as made.url:
        yield made


def said_by(path: str, answer: dict) -> list[tuple[str, str]]:
    """The thoughts, the text and the calls of a whole answer, in their order."""
    if path == "chat/completions":
        message = answer["choices"][0]["message"]
        shown = [(key, message.get(key)) for key in ("reasoning_content", "content")]
        shown += [("call", call["function"]["name"]) for call in message.get("tool_calls", [])]
        return [(kind, said) for kind, said in shown if said]
    if path == "messages":
        return [(b["type"], b.get("text") or b.get("thinking") or b.get("name")) for b in answer["content"]]
    return [(item["type"], item["content"][0]["text"] if "content" in item else "") for item in answer["output"]]


def streamed_by(path: str, given: list[dict]) -> list[tuple[str, str]]:
    """The same of a stream."""
    if path == "responses":
        done = [e["item"] for e in given if e["type"] == "response.output_item.done"]
        return said_by(path, {"output": done})
    shown: list[tuple[str, str]] = []
    if path == "messages":
        for event in given:
            if event["type"] == "content_block_start":
                assert event["index"] == len(shown)
                shown.append((event["content_block"]["type"], event["content_block"].get("name", "")))
            elif event["type"] == "content_block_delta":
                kind, said = shown[event["index"]]
                delta = event["delta"]
                shown[event["index"]] = (kind, said + (delta.get("text") or delta.get("thinking") or ""))
        return shown
    for delta in (choice["delta"] for event in given for choice in event["choices"]):
        shown += [(key, delta[key]) for key in ("reasoning_content", "content") if delta.get(key)]
        shown += [("call", c["function"]["name"]) for c in delta.get("tool_calls", []) if c["function"].get("name")]
    return shown


@pytest.mark.parametrize("path", FORMATS)
def test_thoughts_come_before_the_text_in_whole_answers_and_in_streams(reading, path):
    thinking, text = {
        "chat/completions": ("reasoning_content", "content"),
        "messages": ("thinking", "text"),
        "responses": ("reasoning", "message"),
    }[path]
    said = "<think>hm</think>So: 4."
    episode = reading.episode(said, said)
    whole = said_by(path, reading.post(path, episode, begun(path)).json())
    assert whole == [(thinking, "hm"), (text, "So: 4.")]
    assert streamed_by(path, events(reading.post(path, episode, begun(path) | {"stream": True}))) == whole


OWN_CALL = '<call>{"name": "add", "arguments": {"a": 2}}</call>'


def test_an_answer_that_its_tokenizer_reads_ends_before_its_stop_string(reading):
    path, body = "chat/completions", begun("chat/completions") | {"stop": [" STOP"]}
    episode = reading.episode("It is 4. STOP more", "It is 4. STOP more", f"So: {OWN_CALL} STOP more", "It is 4.")
    choice = reading.post(path, episode, body).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("It is 4.", " STOP")
    kept = reading.post(path, episode, body | {"include_stop_str_in_output": True}).json()
    assert kept["choices"][0]["message"]["content"] == "It is 4. STOP"
    called = reading.post(path, episode, body).json()
    assert parts(path, called) == ("So:", [("add", {"a": 2})], "tool_calls")
    again = reading.post(path, episode, continued(path, body, called))
    assert again.headers["x-memopd-drift"] == "replies=1; drifted=0"  # the reply is known by what was answered
    (first, *_, last) = reading.recorded(episode).calls
    assert tokenizer().decode(first.completion).startswith("It is 4. STOP")
    assert OWN_CALL in tokenizer().decode(last.prompt)


def test_unfinished_thoughts_have_no_end_token(reading):
    path = "chat/completions"
    episode = reading.episode("<think>hm, let me")
    message = reading.post(path, episode, begun(path)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, let me", "")


@pytest.mark.parametrize("path", FORMATS)
def test_a_form_without_a_grammar_refuses_tools_together_with_an_answer_in_json(reading, path):
    episode = reading.episode('{"a": 2}', '{"a": 2}')
    refused = reading.post(path, episode, begun(path) | IN_JSON[path])
    assert refused.status_code == 400
    assert "send tools or a schema for the answer, not both" in refused.json()["error"]["message"]
    assert reading.post(path, episode, begun(path) | {"tools": []} | IN_JSON[path]).status_code == 200


def test_calls_that_their_client_marks(server):
    episode = server.episode("A summary.", "It is 4.")
    path, body = "chat/completions", {"messages": [{"role": "user", "content": "hi"}]}
    marked = server.post(path, episode, body | {"temperature": 0.2}, purpose="summary", trainable="false")
    assert marked.headers["x-memopd-trainable"] == "false"
    assert server.post(path, episode, body).headers["x-memopd-trainable"] == "true"
    recorded = server.recorded(episode)
    assert [(call.purpose, call.trainable) for call in recorded.calls] == [("summary", False), ("", True)]
    assert recorded.sampling == Sampling()  # of the call that trains
    for headers in ({"trainable": "maybe"}, {"purpose": "a b"}, {"episode": "a b"}):
        assert server.post(path, "other", body, **headers).status_code == 400
    nameless = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny"} | body)
    assert (nameless.status_code, nameless.json()["error"]["code"]) == (400, "no_episode")
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "tiny"


def test_one_url_and_session_ids(server):
    first, second = server.episode("One."), server.episode("One.", "Two.", "Three.")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    for name in (first, second):
        assert httpx.post(f"{server.url}/v1/chat/completions", json=body, headers={"x-session-id": name}).is_success
    by_path = f"{server.url}/episodes/{second}/v1/chat/completions"
    assert httpx.post(by_path, json=body, headers={"x-session-id": first}).is_success  # the path decides
    assert [len(server.recorded(name).calls) for name in (first, second)] == [1, 2]


def test_what_a_choice_says_about_its_end(server):
    episode = server.episode("the town </search> and", "the town", "the town")
    ask = {"messages": [{"role": "user", "content": "hi"}], "stop": ["</search>"]}
    stopped, ended = (server.post("chat/completions", episode, ask).json()["choices"][0] for _ in range(2))
    assert (stopped["stop_reason"], stopped["message"]["content"]) == ("</search>", "the town ")
    assert (ended["stop_reason"], ended["finish_reason"]) == (None, "stop")
    body = {"messages": ask["messages"], "stop_sequences": ["town"]}
    message = server.post("messages", episode, body).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "town")


def test_a_stop_string_over_a_special_token_is_cut(server):
    """The engine reads `<|im_start|>` as text, so it stops; the client must not get what led to it."""
    episode = server.episode("the town<|im_start|>er", "the town<|im_start|>er")
    body = {"messages": [{"role": "user", "content": "hi"}], "stop": ["own<|im_start|>e"]}
    choice = server.post("chat/completions", episode, body).json()["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("the t", "own<|im_start|>e")
    given = events(server.post("chat/completions", episode, body | {"stream": True}))
    assert streamed("chat/completions", given)[0] == "the t"


def test_limits_log_probabilities_and_template_variables(server, monkeypatch):
    episode = server.episode("It is 4.", "It is 4.", "It is 4.", "It is 4.")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    cut = server.post("chat/completions", episode, body | {"max_tokens": 100_000})
    room = 4096 - len(server.engine.requests[-1].prompt)
    assert cut.headers["x-memopd-max-tokens"] == f"{room}; asked=100000"
    assert server.engine.requests[-1].sampling.max_tokens == room
    listed = server.post("chat/completions", episode, body | {"logprobs": True, "top_logprobs": 1}).json()
    first = listed["choices"][0]["logprobs"]["content"][0]
    assert first["top_logprobs"] == [{"token": "It", "logprob": -0.125, "bytes": [73, 116]}]
    response = server.post("responses", episode, {"input": "hi", "top_logprobs": 1}).json()
    assert response["output"][0]["content"][0]["logprobs"][0]["top_logprobs"][0]["token"] == "It"
    assert "x-memopd-max-tokens" not in server.post("completions", episode, {"prompt": "x", "logprobs": 1}).headers
    server.says.append("It is 4.")
    assert server.post("chat/completions", episode, body | {"chat_template_kwargs": {"x": 1}}).is_success


def test_counting_tokens_records_nothing(server):
    episode = server.episode(SAID)
    count = server.post("messages/count_tokens", episode, begun("messages")).json()
    assert httpx.get(f"{server.url}/episodes/{episode}").status_code == 404
    server.post("messages", episode, begun("messages"))
    assert count == {"input_tokens": len(server.engine.requests[-1].prompt)}


DEEP = json.loads("[" * 300 + "]" * 300)
REFUSED = [
    ("messages", {"tools": [{"name": "f", "input_schema": {"enum": DEEP}}]}, "tools[0].input_schema"),
    ("chat/completions", {"chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs"),
    ("messages", {"max_tokens": None}, "max_tokens"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type"),
    ("messages", {"mcp_servers": [{"secret": 1}]}, "mcp_servers"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ("messages", {"tool_choice": {"type": "tool", "name": "secret"}}, "tool_choice"),
    ("messages", {"secret": 1}, "'secret'"),
    ("responses", {"previous_response_id": "resp_secret"}, "previous_response_id"),
    ("responses", {"conversation": "secret"}, "conversation"),
    ("responses", {"background": True}, "background"),
    ("responses", {"truncation": "auto"}, "truncation"),
    ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
]


def test_what_is_not_supported_is_refused_by_name(server, caplog):
    server.episode()
    with caplog.at_level(logging.WARNING):
        for path, change, field in REFUSED:
            caplog.clear()
            answer = server.post(path, "refused", begun(path) | change)
            assert answer.status_code == 400, (path, change)
            error = answer.json()["error"]
            assert field in error["message"], error
            assert error["type"] == "invalid_request_error"
            assert ("type" in answer.json()) == (path == "messages")  # Anthropic's form
            (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("memopd")]
            assert "secret" not in line
    assert server.engine.requests == []
