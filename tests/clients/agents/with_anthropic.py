"""Anthropic's own client: messages with tools, as a whole and as a stream, and a count of tokens."""

import httpx2
from anthropic import Anthropic
from tools import CALCULATE, LOOK_UP, QUESTION, episode_url, gateway, report, use, watch

MODEL = gateway()[1]
TOOLS = [
    {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in (LOOK_UP, CALCULATE)
]


def play(episode, stream):
    ids = []
    client = Anthropic(base_url=episode_url(episode), api_key="none", http_client=watch(httpx2, ids), max_retries=0)
    read = {"model": MODEL, "system": "Use the tools.", "tools": TOOLS}
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(6):
        counted = client.messages.count_tokens(messages=messages, **read).input_tokens
        settings = read | {"max_tokens": 200, "extra_body": {"return_token_ids": True}}
        if stream:
            with client.messages.stream(messages=messages, **settings) as events:
                sampled = [event.token_ids for event in events if event.type == "message_delta"]
                whole = events.get_final_message()
            ids.append([whole.prompt_token_ids, *sampled])
        else:
            whole = client.messages.create(messages=messages, **settings)
        assert whole.usage.input_tokens == counted
        calls = [block for block in whole.content if block.type == "tool_use"]
        assert whole.stop_reason == ("tool_use" if calls else "end_turn"), whole.stop_reason
        if not calls:
            return {"answer": whole.content[-1].text, "ids": ids}
        messages.append({"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in whole.content]})
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": use(c.name, c.input)} for c in calls]
        messages.append({"role": "user", "content": results})
    raise RuntimeError("the agent did not finish")


report(anthropic=play("anthropic", False), anthropic_stream=play("anthropic_stream", True))
