"""Packed scoring in your own loop: one step of policy gradient on calls that share their prompt."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import memopd

torch.manual_seed(0)
config = LlamaConfig(vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config)  # any causal LM: from_pretrained("Qwen/Qwen2.5-3B"), ...
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

task, note = list(range(40, 90)), [7, 7, 3]  # ids of the prompt, and of a memory the agent kept
calls = [memopd.Call(task, [11, 12, 13]), memopd.Call(task + note, [14, 15]), memopd.Call(task + note, [16, 17])]
advantages = [0.5, 1.0, -1.0]

logprobs = memopd.packed_logprobs(model, calls)  # one tensor per call; the prompt is computed once, not three times
loss = -sum(a * lp.sum() for a, lp in zip(advantages, logprobs, strict=True)) / sum(len(lp) for lp in logprobs)
loss.backward()
optimiser.step()
print(f"loss {loss.item():.4f} over {sum(len(lp) for lp in logprobs)} sampled tokens")
