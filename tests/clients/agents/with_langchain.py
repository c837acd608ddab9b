"""langchain's create_agent with tools, and with SummarizationMiddleware, which replaces old messages by a summary."""

import httpx2
import tools
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_openai import ChatOpenAI
from tools import QUESTION, episode_url, gateway, report, watch

MODEL = gateway()[1]


def play(episode, trigger):
    ids = []

    def model(**headers):
        return ChatOpenAI(
            model=MODEL, base_url=f"{episode_url(episode)}/v1", api_key="none", http_client=watch(httpx2, ids),
            max_retries=0, temperature=1, extra_body={"return_token_ids": True}, default_headers=headers,
        )  # fmt: skip

    summariser = model(**{"x-memopd-purpose": "summary", "x-memopd-trainable": "false"})
    agent = create_agent(
        model(), tools=[tools.look_up, tools.calculate], system_prompt="Use the tools.",
        middleware=[SummarizationMiddleware(summariser, trigger=trigger, keep=("messages", 2))] if trigger else [],
    )  # fmt: skip
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]}, {"recursion_limit": 30})
    return {"answer": state["messages"][-1].text, "ids": ids}


report(langchain=play("langchain", None), langchain_summary=play("langchain_summary", ("messages", 4)))
