"""A reward of your own: a function of the task and the agent's responses.

PYTHONPATH=examples memopd rollout TASKS --reward own_reward:brief --index INDEX --model MODEL -o EPISODES
PYTHONPATH=examples memopd train CONFIG --output RUN --tasks.reward own_reward:brief
"""

from memopd.tasks.grading import grade


def brief(task, responses):
    """What was right, less a little for every character of the summaries that carried it."""
    return grade(task.questions, responses[-1]).em - 0.0005 * sum(map(len, responses))
