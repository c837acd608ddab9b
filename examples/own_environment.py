"""An environment of your own: a class with three methods on text. Here each search of an episode has a higher price.

PYTHONPATH=examples memopd rollout TASKS --environment own_environment:PricedSearch --index INDEX --model MODEL \\
    -o EPISODES
PYTHONPATH=examples memopd train CONFIG --output RUN --tasks.environment own_environment:PricedSearch
"""

from dataclasses import replace

from memopd.agent import SearchEnvironment


class PricedSearch:
    """The search environment, in which the n-th search costs n times the price."""

    def __init__(self, index, topk, reward, grading, price=0.02):
        self.search = SearchEnvironment(index, topk, reward=reward, grading=grading)
        self.price = price

    def start(self, task):
        """The user turn, and where the first response ends."""
        return self.search.start(task)

    def step(self, live):
        """What every live episode reads next (no text: it is over), and the reward r_t of the call just made."""
        return [
            seen if seen.text is None else replace(seen, reward=-self.price * len(progress.responses))
            for progress, seen in zip(live, self.search.step(live), strict=True)
        ]

    def grade(self, task, responses):
        """The outcome. Its reward is paid on the last sampled token."""
        return self.search.grade(task, responses)
