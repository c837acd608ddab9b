"""What the agents in this folder share: their question, two harmless tools, and what they print at the end.

An agent is a program: `python with_X.py URL MODEL`. It plays one or a few episodes through the gateway at URL and
prints one JSON object: for each episode its answer, and the ids that the client saw, if it can see them.
"""

import json
import re
import sys

QUESTION = "The Velm is a river. How long is it in all, if a canal of 12 km is added three times?"
LENGTHS = {"Velm": "90 km", "Orre": "41 km"}

LOOK_UP = {
    "name": "look_up",
    "description": "The length of a river.",
    "parameters": {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
}
CALCULATE = {
    "name": "calculate",
    "description": "The value of an arithmetic expression with + - * / and parentheses.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


def look_up(river: str) -> str:
    """The length of a river."""
    return LENGTHS.get(river, "There is no such river.")


def calculate(expression: str) -> str:
    """The value of an arithmetic expression. A small parser reads it: nothing that a model wrote is ever run."""
    parts = re.findall(r"\d+\.?\d*|\S", expression)
    try:
        value = _sum(parts)
        return "This is no expression." if parts else f"{value:g}"
    except (LookupError, ValueError, ZeroDivisionError, RecursionError):
        return "This is no expression."


def use(name: str, arguments: str | dict) -> str:
    """The result of the tool call that a model asks for."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"look_up": look_up, "calculate": calculate}[name](**given)


def _sum(parts: list[str]) -> float:
    value = _product(parts)
    while parts and parts[0] in "+-":
        value += _product(parts) if parts.pop(0) == "+" else -_product(parts)
    return value


def _product(parts: list[str]) -> float:
    value = _atom(parts)
    while parts and parts[0] in "*/":
        value = value * _atom(parts) if parts.pop(0) == "*" else value / _atom(parts)
    return value


def _atom(parts: list[str]) -> float:
    part = parts.pop(0)
    if part == "-":
        return -_atom(parts)
    if part != "(":
        return float(part)
    value = _sum(parts)
    if parts.pop(0) != ")":
        raise ValueError
    return value


# Episodes


def gateway() -> tuple[str, str]:
    """The address of the gateway and the name of the model."""
    return sys.argv[1], sys.argv[2]


def episode_url(episode: str) -> str:
    """A base URL without /v1, as anthropic's client wants it."""
    return f"{sys.argv[1]}/episodes/{episode}"


def watch(httpx: object, ids: list, asynchronous: bool = False) -> object:
    """An HTTP client that adds to `ids` the prompt's and the completion's ids of every answer that is not streamed."""

    def keep(response: object) -> None:
        body = response.json()
        if "prompt_token_ids" in body:
            choice = body["choices"][0] if "choices" in body else body
            ids.append([body["prompt_token_ids"], choice["token_ids"]])

    def whole(response: object) -> bool:
        return response.headers.get("content-type", "").startswith("application/json")

    def read(response: object) -> None:
        if whole(response):
            response.read()
            keep(response)

    async def aread(response: object) -> None:
        if whole(response):
            await response.aread()
            keep(response)

    if asynchronous:
        return httpx.AsyncClient(event_hooks={"response": [aread]})
    return httpx.Client(event_hooks={"response": [read]})


def report(**episodes: dict) -> None:
    """Print of each episode the `answer`, and as `ids` the pairs of a prompt's and a completion's ids."""
    print(json.dumps(episodes))
