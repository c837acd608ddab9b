"""verifiers' client: one address for all rollouts, which X-Session-ID tells apart; in its three dialects."""

import asyncio

from tools import CALCULATE, LOOK_UP, QUESTION, gateway, report, use
from verifiers.v1.clients import EvalClient, EvalClientConfig
from verifiers.v1.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
from verifiers.v1.types import SamplingConfig

URL, MODEL = gateway()
TOOLS = (LOOK_UP, CALCULATE)


def chat():
    """The request, and a function that adds an answer and the results of its tool calls."""
    messages = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": QUESTION}]

    def extend(raw, results):
        messages.append(raw["choices"][0]["message"])
        messages.extend({"role": "tool", "tool_call_id": id, "content": text} for id, text in results)

    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    return {"messages": messages, "tools": tools, "return_token_ids": True}, extend


def anthropic():
    messages = [{"role": "user", "content": QUESTION}]
    tools = [{k.replace("parameters", "input_schema"): v for k, v in tool.items()} for tool in TOOLS]

    def extend(raw, results):
        messages.append({"role": "assistant", "content": raw["content"]})
        content = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        messages.append({"role": "user", "content": content})

    return {"messages": messages, "tools": tools, "max_tokens": 200, "system": "Use the tools."}, extend


def responses():
    items = [{"role": "user", "content": QUESTION}]

    def extend(raw, results):
        items.extend(raw["output"])
        items.extend({"type": "function_call_output", "call_id": id, "output": text} for id, text in results)

    return {"input": items, "tools": [{"type": "function"} | t for t in TOOLS]}, extend


async def play(episode, dialect, start):
    client, ids = EvalClient(EvalClientConfig(base_url=f"{URL}/v1", api_key_var="NO_KEY")), []
    body, extend = start()
    for _ in range(6):
        response = await client.get_response(dialect, body | {"model": MODEL}, SamplingConfig(), session_id=episode)
        raw = response.raw
        if "choices" in raw:
            ids.append([raw["prompt_token_ids"], raw["choices"][0]["token_ids"]])
        calls = response.message.tool_calls or []
        if not calls:
            await client.close()
            return {"answer": response.message.content, "ids": ids}
        extend(raw, [(call.id, use(call.name, call.arguments)) for call in calls])
    raise RuntimeError("the agent did not finish")


report(
    verifiers_chat=asyncio.run(play("verifiers_chat", ChatDialect(), chat)),
    verifiers_messages=asyncio.run(play("verifiers_messages", AnthropicDialect(), anthropic)),
    verifiers_responses=asyncio.run(play("verifiers_responses", ResponsesDialect(), responses)),
)
