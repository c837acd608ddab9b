"""Real vLLM servers, started as a user starts them, with tiny models that are made on the spot."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import numpy as np

from memopd.agent import Observation, Outcome
from memopd.agent.protocol import INSTRUCTIONS

PYTHON = os.environ.get("MEMOPD_VLLM_PYTHON")
MEMOPD = [sys.executable, "-m", "memopd.cli"]

# The verb as `memopd serve` has it, without the rest of the command line.
VERB = "import typer; from memopd.cli import policy; app = typer.Typer(); policy.register(app); app()"

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def make_tokenizer(path: Path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=alphabet)
    text = "<think>the town on the river</think><search>river Tal</search><answer>Boro; Kallin</answer>"
    trained.train_from_iterator([text, INSTRUCTIONS] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>", chat_template=CHAT)
    tokenizer.save_pretrained(path)
    return tokenizer


def make_model(path: Path, seed: int, tied: bool = False):
    """Weights wide enough for peaked distributions: a wrong one shows at the first token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(path)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,  # heads of 32: vLLM's CPU attention knows none of 16
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(path)
    return model, tokenizer


@dataclass
class Running:
    url: str
    process: subprocess.Popen
    log: Path

    def kill(self):
        """As a crash or a lost machine: nothing is said, all of it is gone."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(model: Path, port: int | None = None, *rest: str, lora_rank: int = 0):
    """A server, as a user starts one. It is not waited for."""
    port = port or free_port()
    log = model.parent / f"server-{port}-{time.time():.0f}.log"
    arguments = [str(model), "--port", str(port), "--dtype", "float32", "--python", PYTHON]
    arguments += ["--lora-rank", str(lora_rank), "--", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # a server is four processes: the first compiles vLLM for all
    with log.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-c", VERB, *arguments, *rest],
            env=environment, stdout=lines, stderr=lines, start_new_session=True,
        )  # fmt: skip
    running = Running(f"http://127.0.0.1:{port}", process, log)
    try:
        yield running
    finally:
        if process.poll() is None:
            running.kill()


def wait_until_up(*servers: Running, seconds: float = 400):
    limit = time.monotonic() + seconds
    for server in servers:
        while True:
            try:
                if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            tail = server.log.read_text()[-2000:]
            assert server.process.poll() is None, tail
            assert time.monotonic() < limit, tail
            time.sleep(0.5)


def prompts_of(tokenizer, count, seed=0, longest=200):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, len(tokenizer), n).astype(np.int32) for n in rng.integers(1, longest, count)]


def scorer(model):
    """What a trainer would say of sampled tokens: every pair alone, unpadded."""
    import torch

    @torch.no_grad()
    def score(pairs, temperature):
        scores = []
        for prompt, completion in pairs:
            path = torch.tensor([[*prompt.tolist(), *completion.tolist()]])
            logits = model(path).logits[0, len(prompt) - 1 : -1] / temperature
            chosen = torch.tensor(completion.tolist())[:, None]
            scores.append(logits.log_softmax(-1).gather(1, chosen)[:, 0].double().numpy())
        return scores

    return score


CONFIG = """
[model]
student = "{student}"

[tasks]
train = "{folder}/tasks.jsonl"
index = "{folder}/index"
max_context = 400
reward = "real_vllm:brevity"

[sampling]
servers = ["{server}"]
max_tokens = 60

[optimise]
steps = 2
tasks = 4
samples = 2
mini_batch = 8
lr = 1e-2
warmup = 0.0

[teacher]
state = "none"
"""


def start_training(folder, student, server, output, *options, more="", **environment):
    """`memopd train` that samples from a server, two steps unless an option says otherwise."""
    config = output.with_suffix(".toml")
    config.write_text(CONFIG.format(folder=folder, student=student, server=server) + more)
    modules = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": modules, **environment}
    line = [*MEMOPD, "train", config, "--output", output, *options]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell starts what runs in its background with SIGINT ignored, and so it would be here.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(line, env=environment, preexec_fn=heard, **piped)


def train(folder, student, server, output, more=""):
    """The same, to its end. `more` is added to the configuration."""
    process = start_training(folder, student, server, output, more=more)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def requests_running(server) -> float:
    """How many requests the server works on, as it says itself."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


class Talk:
    """An environment of four calls per episode, whatever the policy says."""

    def start(self, task):
        return Observation(f"Say {task.id}")

    def step(self, live):
        return [Observation("Again." if len(p.responses) < 4 else None) for p in live]

    def grade(self, task, responses):
        return Outcome(brevity(task, responses))


class Counted(Talk):
    """The same. The file ANSWERS has a byte for every answer of the policy, so that a test knows which batch runs."""

    def step(self, live):
        with Path(os.environ["ANSWERS"]).open("ab") as file:
            file.write(b"." * len(live))
        return super().step(live)


class SlowTool(Talk):
    """The same with a tool that takes a twentieth of a second, as a search over a network does."""

    def step(self, live):
        time.sleep(0.05)
        return super().step(live)


def brevity(task, responses) -> float:
    """A reward that an untrained policy earns in part."""
    return 1.0 / (1 + sum(map(len, responses)) / 100)
