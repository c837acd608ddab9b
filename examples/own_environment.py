"""An environment of your own, three methods on text: here a search that costs something, more each time.

python examples/own_environment.py TASKS INDEX MODEL EPISODES
"""

import sys
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from memopd.agent.environment import SearchEnvironment
from memopd.agent.memory import Mem1
from memopd.agent.rollout import repeat, rollout
from memopd.engine.local import LocalEngine
from memopd.record import write_episodes
from memopd.retrieval import open_index
from memopd.tasks.files import read_tasks
from memopd.types import Sampling


class PricedSearch:
    """Environments can stand on one another. This one changes what a search costs and nothing else."""

    def __init__(self, inner, price=0.02):
        self.inner, self.price = inner, price

    def start(self, task):
        """The user turn, and where the first response ends."""
        return self.inner.start(task)

    def step(self, live):
        """What every live episode reads next (no text: it is over), and the reward r_t of the call just made."""
        return [
            seen if seen.text is None else replace(seen, reward=-self.price * len(progress.responses))
            for progress, seen in zip(live, self.inner.step(live), strict=True)
        ]

    def grade(self, task, responses):
        """The outcome, paid on the last sampled token."""
        return self.inner.grade(task, responses)


if __name__ == "__main__":
    tasks, index, model, store = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)  # as it will be trained
    engine = LocalEngine(policy, tokenizer, slots=32, max_length=1120)
    episodes = rollout(
        engine, PricedSearch(SearchEnvironment(open_index(index))), Mem1(), tokenizer,
        repeat(read_tasks(tasks)[:8], samples=4), Sampling(max_tokens=96), seed=0, batch=32, max_context=1024,
        rule="mem1",
    )  # fmt: skip
    print(f"{store}: {write_episodes(store, episodes)} episodes")
    engine.close()
