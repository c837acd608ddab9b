"""litellm, which sends its own fields back inside assistant messages; as a whole and as a stream."""

import litellm
from tools import CALCULATE, LOOK_UP, QUESTION, episode_url, gateway, report, use

MODEL = gateway()[1]


def play(episode, stream):
    ids = []
    messages = [{"role": "system", "content": "Use the tools."}, {"role": "user", "content": QUESTION}]
    for _ in range(6):
        whole = litellm.completion(
            model=f"openai/{MODEL}", messages=messages, api_base=f"{episode_url(episode)}/v1", api_key="none",
            tools=[{"type": "function", "function": tool} for tool in (LOOK_UP, CALCULATE)], max_retries=0,
            stream=stream, extra_body={"return_token_ids": True},
        )  # fmt: skip
        if stream:
            whole = litellm.stream_chunk_builder(list(whole), messages=messages)
        else:
            ids.append([whole.prompt_token_ids, whole.choices[0].provider_specific_fields["token_ids"]])
        message = whole.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return {"answer": message.content, "ids": ids}
        for call in message.tool_calls:
            result = use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    raise RuntimeError("the agent did not finish")


report(litellm=play("litellm", False), litellm_stream=play("litellm_stream", True))
