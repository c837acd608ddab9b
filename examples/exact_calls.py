"""The Python API: record two calls, pack them, check the pack, take log-probabilities with their gradient."""

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import memopd
from memopd.record import read_episodes, write_episodes

torch.manual_seed(0)
shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=500, **shape)).eval()


def sample(prompt, count=8):
    """Any sampler will do, if it says which ids it read and which it sampled."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            next_id = torch.multinomial(model(input_ids=ids).logits[:, -1].softmax(-1), 1)
            ids = torch.cat([ids, next_id], dim=1)
    return memopd.Call(prompt, ids[0, len(prompt) :].tolist())


# An agent with compact memory: the second call reads the task, the end of what it said, and something new. The rest is
# gone, so that no flattened history has the state in which its tokens were sampled.
task, found = list(range(40, 90)), [7, 7, 3]
first = sample(task)
second = sample(task + first.completion[-3:].tolist() + found)
episode = memopd.Episode("e0", "task-0", [first, second], reward=1.0)
write_episodes("runs/example.parquet", [episode], overwrite=True)
calls = [call for episode in read_episodes("runs/example.parquet") for call in episode.calls]

packed = memopd.compile_calls(calls)
print(f"{sum(len(c.path) for c in calls)} tokens in 2 calls, {len(packed)} rows packed: the task is computed once")

report = memopd.verify.equivalence(model, calls)
print(f"packed is {'' if report.passed else 'NOT '}what the calls alone are: error {report.error:.1e}, ", end="")
print(f"tolerance {report.tolerance:.1e}, {report.tolerance_source}")

logprobs = memopd.packed_logprobs(model, calls)  # one differentiable tensor per call
loss = -sum(lp.sum() for lp in logprobs) / sum(len(lp) for lp in logprobs)
loss.backward()
norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
print(f"loss {loss:.4f}, gradient norm {norm:.4f}")
