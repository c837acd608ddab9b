"""An agent with tools that rewrites its own context: langchain as it comes, recorded by `memopd gateway`.

pip install langchain langchain-openai
python examples/tool_agent.py http://127.0.0.1:8000 MODEL
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import httpx
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware, wrap_model_call
from langchain.messages import AIMessage
from langchain_openai import ChatOpenAI

gateway, name = sys.argv[1:]
LENGTHS = {"Velm": 90, "Orre": 41, "Tasse": 127}
SAMPLES = 2


def length_of(river: str) -> str:
    """The length of a river in km."""
    return str(LENGTHS.get(river, "unknown"))


def add(first: float, second: float) -> str:
    """The sum of two numbers."""
    return f"{first + second:g}"


@wrap_model_call
def read_bare_calls(request, handler):
    """Qwen2.5-Coder writes its calls as bare JSON, without the tags of its chat template, so they arrive as text."""
    response = handler(request)
    message, known = response.result[0], {tool.name for tool in request.tools}
    uses, at = [], 0
    try:
        while (start := message.text.find("{", at)) >= 0:
            call, at = json.JSONDecoder().raw_decode(message.text, start)
            uses.append({"name": call["name"], "args": dict(call["arguments"]), "id": f"{message.id}-{start}"})
    except (ValueError, TypeError, KeyError):
        uses = []  # an answer, or nothing that can be read
    if uses and known.issuperset(use["name"] for use in uses):
        response.result[0] = AIMessage("", tool_calls=uses, id=message.id)
    return response


def play(episode, rivers):
    """Once there are five messages, a summary that the model writes takes the place of all but the last two."""

    def model(purpose):
        return ChatOpenAI(
            model=name, base_url=f"{gateway}/episodes/{episode}/v1", api_key="none", temperature=0.7, max_tokens=120,
            max_retries=0, default_headers={"x-memopd-purpose": purpose} if purpose else None,
        )  # fmt: skip

    summary = SummarizationMiddleware(model("summary"), trigger=("messages", 5), keep=("messages", 2))
    tools, system = [length_of, add], "Use the tools."
    agent = create_agent(model(""), tools, system_prompt=system, middleware=[summary, read_bare_calls])
    question = f"How many km are the rivers {' and '.join(rivers)} together?"
    try:
        state = agent.invoke({"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 20})
        answer = state["messages"][-1].text
    except Exception as error:  # a small model may call tools forever, or fill its context
        answer = f"({type(error).__name__})"
    reward = float(str(sum(LENGTHS[river] for river in rivers)) in answer)
    httpx.post(f"{gateway}/episodes/{episode}/reward", json={"reward": reward, "task": "+".join(rivers)})
    print(f"{episode}: {answer!r}")
    return reward


with ThreadPoolExecutor(8) as pool:
    games = [(f"{'+'.join(rivers)}-{n}", rivers) for rivers in combinations(LENGTHS, 2) for n in range(SAMPLES)]
    rewards = list(pool.map(lambda game: play(*game), games))
print(f"{len(rewards)} episodes, mean reward {sum(rewards) / len(rewards):.2f}")
