"""The cache on a CPU takes the memory of what was written, and gives it back."""

import json
import subprocess
import sys

import numpy as np
import pytest

from memopd.engine.local import LocalEngine
from memopd.engine.protocol import Request
from memopd.types import Sampling
from memopd.verify.families import tiny_model

MEASURE = """
import json
import numpy as np, torch
from transformers import AutoModelForCausalLM, LlamaConfig
from memopd.engine.local import LocalEngine
from memopd.engine.protocol import Request
from memopd.types import Sampling

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024

# The shape of SmolLM2-135M, except for the vocabulary, which has no part in the cache.
config = LlamaConfig(
    vocab_size=500, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=4096, tie_word_embeddings=True,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
prompts = [np.arange(1, 20 + i) for i in range(12)]

def sample(engine, on_token=None):
    requests = [Request(p, seed=i, sampling=Sampling(max_tokens=4)) for i, p in enumerate(prompts)]
    return [t.completion for t in [engine.submit(r, on_token) for r in requests]]

def fail(token):
    raise RuntimeError("no more")

for f in sample(LocalEngine(model, None, slots=12, max_length=32)): f.result()  # what torch keeps for itself
engine, before = LocalEngine(model, None, slots=12, max_length=4096), resident()
first = [f.result().tokens.tolist() for f in sample(engine)]
found = {"whole": engine.cache_bytes / 2**20, "sampled": resident() - before}
for f in sample(engine, fail): assert isinstance(f.exception(), RuntimeError)
found["failed"] = resident() - before
engine.release()
found["released"] = resident() - before
assert [f.result().tokens.tolist() for f in sample(engine)] == first
print(json.dumps(found))
"""


@pytest.mark.slow  # it commits two gigabytes; the cache itself is tested below
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_short_calls_commit_little_of_a_long_cache():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["whole"] > 2000  # MB, if all were committed
    assert found["sampled"] < 100
    assert found["failed"] < 100  # the slots of failed sequences are cleared, and no more than was written
    assert found["released"] < found["sampled"] / 2


def test_a_released_cache_changes_no_result():
    engine = LocalEngine(tiny_model("qwen2"), None, slots=3, max_length=64)
    requests = [Request(np.arange(5, 25 + i), seed=i, sampling=Sampling(max_tokens=6)) for i in range(5)]
    first = engine.generate(requests)
    assert engine.cache_bytes > 0
    engine.release()
    assert engine.cache_bytes == 0
    again = engine.generate(requests)
    for a, b in zip(first, again, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()
    engine.close()


def test_a_failure_frees_the_cache_while_its_error_is_kept(monkeypatch):
    """The frames of the traceback refer to the cache; its memory must not wait for them."""
    model = tiny_model("qwen2")
    engine = LocalEngine(model, None, slots=2, max_length=64)
    request = Request(np.arange(5, 25), seed=0, sampling=Sampling(max_tokens=6))
    expected = engine.generate([request])[0]

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("in the middle of a pass")

    with monkeypatch.context() as patch:
        patch.setattr("memopd.engine.local.engine.draw_tokens", broken)
        with pytest.raises(RuntimeError, match="in the middle") as kept:
            engine.generate([request])
    assert engine.cache_bytes == 0
    assert engine.generate([request])[0].tokens.tolist() == expected.tokens.tolist()
    assert kept.value is not None
    engine.close()
