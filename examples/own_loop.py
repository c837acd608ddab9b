"""A training loop of your own over recorded episodes: packed rows, any loss on log-probabilities and divergences.

python examples/own_loop.py EPISODES STUDENT TEACHER
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from memopd import fill
from memopd.record import read_episodes
from memopd.score import score, teacher_target

store, student, teacher = sys.argv[1:]
episodes = list(read_episodes(store))[:8]
calls = [call for episode in episodes for call in episode.calls]
packs = fill(calls, budget=4096)  # as few packs of at most 4,096 rows as it finds; calls that start alike stay together
print(f"{sum(len(c.path) for c in calls):,} tokens in {len(calls)} calls: {sum(map(len, packs)):,} rows", end=" ")
print(f"in {len(packs)} packs")

model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
guide = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
target = teacher_target(guide, packs)  # its hidden states at the sampled tokens; logits are made chunk by chunk

# One number per sampled token, in the order in which `score` gives them.
call_of = torch.cat([torch.as_tensor(p.decisions.call) for p in packs]).long()
reward = torch.tensor([episode.reward for episode in episodes for _ in episode.calls])
advantage = (reward - reward.mean())[call_of]

for step in range(3):
    scores = score(model, packs, teacher=target)
    loss = -(advantage * scores.logprob).mean() + 0.3 * scores.divergence.mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()
    print(f"step {step}: loss {loss:.4f}, divergence from the teacher {scores.divergence.mean():.4f}")
