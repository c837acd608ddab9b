"""smolagents' ToolCallingAgent, which asks for its last answer as a tool call, too."""

import httpx2
import tools
from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from tools import QUESTION, episode_url, gateway, report, watch

MODEL = gateway()[1]


@tool
def look_up(river: str) -> str:
    """The length of a river.

    Args:
        river: the river's name
    """
    return tools.look_up(river)


@tool
def calculate(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: with + - * / and parentheses
    """
    return tools.calculate(expression)


def play(episode):
    ids = []
    # Its default, tool_choice="required", restricts sampling, so that nothing could be learnt from these calls.
    model = OpenAIModel(
        MODEL, f"{episode_url(episode)}/v1", api_key="none", tool_choice="auto",
        client_kwargs={"http_client": watch(httpx2, ids), "max_retries": 0}, extra_body={"return_token_ids": True},
    )  # fmt: skip
    agent = ToolCallingAgent([look_up, calculate], model, max_steps=6, verbosity_level=LogLevel.OFF)
    return {"answer": str(agent.run(QUESTION)), "ids": ids}


report(smolagents=play("smolagents"))
