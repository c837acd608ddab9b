"""An agent that knows OpenAI's client and nothing of training; its calls are recorded by `memopd gateway`.

python examples/gateway_agent.py http://127.0.0.1:8000 TASKS INDEX
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
from openai import OpenAI

from memopd.agent.protocol import STOPS, Kind, information, read_action, user_message
from memopd.retrieval import open_index
from memopd.tasks.files import read_tasks
from memopd.tasks.grading import grade

gateway, tasks, index = sys.argv[1], read_tasks(sys.argv[2]), open_index(sys.argv[3])
TURNS = 6


def play(name, task):
    """MEM1: the next call reads the task, the last response and what it found. Everything older is gone."""
    client = OpenAI(base_url=f"{gateway}/episodes/{name}/v1", api_key="none")
    prompt = f"<|im_start|>user\n{user_message(task)}<|im_end|>\n<|im_start|>assistant\n"
    memory = response = ""
    for left in reversed(range(TURNS)):
        response = client.completions.create(
            model="student", prompt=prompt + memory, max_tokens=96, stop=list(STOPS if left else STOPS[1:]),
            extra_body={"include_stop_str_in_output": True},
        ).choices[0].text  # fmt: skip
        action = read_action(response, last=not left)
        if action.kind is not Kind.SEARCH:
            break
        hits = index.search([action.text], k=3)[0] if action.text else []
        memory = response + information([(h.passage.title, h.passage.text) for h in hits], left)
    reward = grade(task.questions, response).em
    httpx.post(f"{gateway}/episodes/{name}/reward", json={"reward": reward, "task": task.id}).raise_for_status()
    return reward


with ThreadPoolExecutor(16) as pool:
    games = [(f"{task.id}-{n}", task) for task in tasks[:8] for n in range(4)]
    rewards = list(pool.map(lambda game: play(*game), games))
print(f"{len(rewards)} episodes, mean reward {sum(rewards) / len(rewards):.2f}")
