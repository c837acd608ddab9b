"""OpenAI's own client: chat completions and responses with tools, each as a whole and as a stream."""

import httpx2
from openai import OpenAI
from tools import CALCULATE, LOOK_UP, QUESTION, episode_url, gateway, report, use, watch

MODEL = gateway()[1]
IDS = {"return_token_ids": True}


def client(episode, ids):
    return OpenAI(base_url=f"{episode_url(episode)}/v1", api_key="none", http_client=watch(httpx2, ids), max_retries=0)


def chat(episode, stream):
    ids = []
    api = client(episode, ids).chat.completions
    settings = {"model": MODEL, "tools": [{"type": "function", "function": tool} for tool in (LOOK_UP, CALCULATE)]}
    settings |= {"extra_body": IDS, "parallel_tool_calls": True}
    messages = [{"role": "developer", "content": "Use the tools."}, {"role": "user", "content": QUESTION}]
    for _ in range(6):
        if stream:
            with api.stream(messages=messages, **settings) as events:
                chunks = [event.chunk for event in events if event.type == "chunk"]
                whole = events.get_final_completion()
            ids.append([chunks[0].prompt_token_ids, chunks[-1].choices[0].token_ids])
        else:
            whole = api.create(messages=messages, **settings)
        choice = whole.choices[0]
        messages.append(choice.message.model_dump(exclude_none=not stream))
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == ("tool_calls" if calls else "stop"), choice.finish_reason
        if not calls:
            return {"answer": choice.message.content, "ids": ids}
        for call in calls:
            result = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise RuntimeError("the agent did not finish")


def responses(episode, stream):
    ids = []
    api = client(episode, ids).responses
    settings = {"model": MODEL, "tools": [{"type": "function", "strict": False} | t for t in (LOOK_UP, CALCULATE)]}
    settings |= {"instructions": "Use the tools.", "store": False, "extra_body": IDS}
    items = [{"role": "user", "content": QUESTION}]
    for _ in range(6):
        if stream:
            with api.stream(input=items, **settings) as events:
                for _ in events:
                    pass
                whole = events.get_final_response()
            ids.append([whole.prompt_token_ids, whole.token_ids])
        else:
            whole = api.create(input=items, **settings)
        calls = [item for item in whole.output if item.type == "function_call"]
        if not calls:
            return {"answer": whole.output_text, "ids": ids}
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in whole.output]
        for call in calls:
            result = use(call.name, call.arguments)
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise RuntimeError("the agent did not finish")


report(
    openai_chat=chat("openai_chat", False),
    openai_chat_stream=chat("openai_chat_stream", True),
    openai_responses=responses("openai_responses", False),
    openai_responses_stream=responses("openai_responses_stream", True),
)
