"""A client in the shape of MEM1's: plain HTTP, one address for all rows, the matched stop string read from the answer.

The header is the one change: it says to which episode a call belongs.
"""

import httpx
from tools import QUESTION, gateway, look_up, report

URL, MODEL = gateway()
STOPS = ["</search>", "</answer>"]


def ask(episode, route, body):
    """The text with the stop string, which the answer leaves out and names."""
    body |= {"model": MODEL, "stop": STOPS, "return_token_ids": True}
    answer = httpx.post(f"{URL}/v1/{route}", json=body, headers={"x-memopd-episode": episode}).json()
    choice = answer["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    prompt = choice["prompt_token_ids"] if "text" in choice else answer["prompt_token_ids"]
    return text.strip() + (choice["stop_reason"] or ""), [prompt, choice["token_ids"]]


def play(episode, route, **sampling):
    """The next call reads the task, the last response and what it found. Everything older is gone."""
    memory, ids = "", []
    task = f"{QUESTION} Think in <think>, then <search> or <answer>."
    for _ in range(6):
        if route == "completions":
            body = {"prompt": f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n{memory}", "max_tokens": 100}
        else:
            body = {"messages": [{"role": "user", "content": task + memory}]}
        response, seen = ask(episode, route, body | sampling)
        ids.append(seen)
        if response.endswith("</answer>"):
            return {"answer": response.rpartition("<answer>")[2].removesuffix("</answer>"), "ids": ids}
        found = look_up(response.rpartition("<search>")[2].removesuffix("</search>"))
        memory = f"{response}<information>\n{found}\n</information>"
    raise RuntimeError("the agent did not finish")


report(
    mem1_chat=play("mem1_chat", "chat/completions"),
    mem1_completions=play("mem1_completions", "completions"),
    mem1_defaults=play("mem1_defaults", "completions", temperature=0.01, top_p=0.95),
)
