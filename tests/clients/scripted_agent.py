"""What a model that calls tools would say to the agents of agents/: Qwen's tool calls, then their result."""

from __future__ import annotations

import json
import re

CANAL = 12
SUMMARY = "The Velm is 90 km long. A canal of 12 km is added three times."
BEGIN, END = "<tool_call>", "</tool_call>"


def say(episode: str, prompt: str) -> str:
    """The completion for a prompt, from what it shows of the tools and of their results."""
    system, _, dialogue = prompt.partition("<|im_end|>")
    if "<search>" in prompt:
        return _mem1(prompt)
    if "extract" in dialogue.lower() and "context" in dialogue.lower():  # langchain's request for a summary
        return SUMMARY
    length = re.search(r"(\d+) km(?! is added)", dialogue.rpartition("added three times?")[2] or dialogue)
    total = re.search(r"\b126\b", dialogue)
    if total:
        answer = f"{total[0]} km"
        return _call("final_answer", answer=answer) if "final_answer" in system else f"It is {answer} long in all."
    if length is None:
        second = _call("look_up", river="Orre") if episode == "openai_chat" else ""  # two calls in one turn
        return "I look it up.\n" + _call("look_up", river="Velm") + ("\n" + second if second else "")
    if "calculate" in system:
        return _call("calculate", expression=f"{length[1]} + 3 * {CANAL}")
    return _call("transfer_to_counter")


def say_example(prompt: str) -> str:
    """The same for examples/tool_agent.py: two look-ups in one turn, a sum as bare JSON, and the answer."""
    dialogue = prompt.partition("<|im_end|>")[2]
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", dialogue)
    if "extract" in dialogue.lower():
        return "Two rivers are to be added."
    if not results:
        rivers = re.search(r"rivers (\w+) and (\w+) together", dialogue).groups()
        return "\n".join(_call("length_of", river=river) for river in rivers)
    if len(results) == 2:
        call = _call("add", first=int(results[0]), second=int(results[1]))
        return call.removeprefix(BEGIN).removesuffix(END).strip()
    return f"Together they are {results[-1]} km long."


def _call(name: str, **arguments: str | int) -> str:
    return f"{BEGIN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{END}"


def _mem1(prompt: str) -> str:
    found = re.search(r"<information>\n(\d+) km", prompt)
    if found:
        return f"<think>{found[1]} and three times {CANAL}.</think><answer>{int(found[1]) + 3 * CANAL} km</answer>"
    return "<think>I need the length.</think><search>Velm</search>"
