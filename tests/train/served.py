"""Servers without vLLM: a model of this process in place of `VllmEngine`, for training that samples from servers."""

import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from live import policy
from transformers import AutoModelForCausalLM

from memopd.engine.local import LocalEngine
from memopd.engine.protocol import Request
from memopd.engine.vllm.engine import StaleWeights
from memopd.train import engines


class Servers:
    """What ServedPolicy asks of VllmEngine, with a model of its own behind it."""

    deaf = False  # a server that keeps the weights it was started with

    def __init__(self, urls, tokenizer, *, folder: Path) -> None:
        self.urls, self.folder = urls, folder
        self.model = AutoModelForCausalLM.from_pretrained(policy() / "model").eval()
        self.engine = LocalEngine(self.model, tokenizer, slots=8, max_length=1024)
        self.verified = 0
        self.lock = threading.RLock()

    @contextmanager
    def updating(self):
        with self.lock:
            yield

    def update(self, weights, version):
        named = dict(self.model.named_parameters())
        assert weights.keys() == named.keys()
        if not self.deaf:
            self.engine.update(weights, version)

    def verify(self, score, prompts, *, tolerance, sampling):
        requests = [Request(p, seed=i, sampling=sampling) for i, p in enumerate(prompts)]
        answers = self.engine.generate(requests)
        ours = score([(r.prompt, a.tokens) for r, a in zip(requests, answers, strict=True)], sampling.temperature)
        gap = max(np.abs(o - a.logprobs).max() for o, a in zip(ours, answers, strict=True))
        if not gap <= tolerance:
            raise StaleWeights("http://one", 1, gap, tolerance)
        self.verified += 1

    def generate(self, requests):
        with self.lock:
            return self.engine.generate(requests)

    def close(self):
        self.engine.close()


class Fatal(Servers):
    """Kills the whole process in the middle of an episode of step 3."""

    calls = 0

    def generate(self, requests):
        self.calls += any(request.episode.startswith("step-000003/") for request in requests)
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(requests)


class Broken(Servers):
    """Fails in the middle of a batch that is sampled ahead."""

    def generate(self, requests):
        if any(request.episode.startswith("step-000001/") for request in requests):
            raise ValueError("http://one: as planned")
        return super().generate(requests)


def served() -> None:
    """For the process of a command: sample from these servers."""
    engines.VllmEngine = Servers


def served_until_killed() -> None:
    engines.VllmEngine = Fatal


def served_badly() -> None:
    engines.VllmEngine = Broken
