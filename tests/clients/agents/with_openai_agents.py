"""openai-agents: a clerk who looks things up and hands over to a counter; over chat completions and over responses."""

import httpx2
import tools
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from tools import QUESTION, episode_url, gateway, report, watch

set_tracing_disabled(True)
MODEL = gateway()[1]


def play(episode, kind):
    ids = []
    client = AsyncOpenAI(
        base_url=f"{episode_url(episode)}/v1", api_key="none", http_client=watch(httpx2, ids, True), max_retries=0
    )
    model = kind(MODEL, client)
    settings = ModelSettings(extra_body={"return_token_ids": True} if kind is OpenAIChatCompletionsModel else None)
    counter = Agent(
        name="counter", instructions="You calculate.", model=model, model_settings=settings,
        tools=[function_tool(tools.calculate)], handoff_description="Calculates.",
    )  # fmt: skip
    clerk = Agent(
        name="clerk", instructions="You look up rivers, then hand over to the counter.", model=model,
        model_settings=settings, tools=[function_tool(tools.look_up)], handoffs=[counter],
    )  # fmt: skip
    result = Runner.run_sync(clerk, QUESTION, max_turns=6)
    assert result.last_agent is counter
    return {"answer": result.final_output, "ids": ids}


report(
    agents_chat=play("agents_chat", OpenAIChatCompletionsModel),
    agents_responses=play("agents_responses", OpenAIResponsesModel),
)
