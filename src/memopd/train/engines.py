"""The engines that sample with the current policy, in this process or on vLLM servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from memopd.agent.codec import prefix_of
from memopd.agent.protocol import user_message
from memopd.compile import compile_calls
from memopd.config import RunConfig
from memopd.engine.local import LocalEngine
from memopd.engine.vllm import VllmEngine, rounding_tolerance
from memopd.files import read_object
from memopd.models.adapters import save_adapter
from memopd.models.folder import check_on_hub, is_folder
from memopd.models.sampled import DEVICES, SamplingCopy
from memopd.models.support import position_limit
from memopd.score import packed_logprobs
from memopd.tasks.files import read_tasks
from memopd.train import ranks
from memopd.train.models import PolicyRoot, copy_weights, is_sharded, whole_copy, whole_weights
from memopd.types import Call, Floats, Ids, Sampling
from memopd.verify.equivalence import MORE_PRECISE, name_of

PROMPTS, TOKENS = 4, 16  # for the verification of servers: prompts, and tokens per prompt
KEPT = 0.1  # of a GPU's memory: a cache up to this size stays between steps, which saves capturing CUDA graphs again


def check_positions(config: RunConfig, path: str) -> None:
    """Check, before any model is loaded, that the longest sequence fits into the positions of the one that samples."""
    context, response = config.tasks.max_context, config.sampling.max_tokens
    if not path or config.sampling.servers:
        return
    if not is_folder(path):
        check_on_hub(path)
    try:
        if Path(path).is_file():
            shape = transformers.AutoConfig.for_model(**read_object(Path(path)))
        else:
            shape = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        limit = position_limit(SimpleNamespace(config=shape))
    except Exception:  # loading the model says what is wrong with it
        return
    if context + response > limit:
        raise ValueError(
            f"tasks.max_context = {context} and sampling.max_tokens = {response} need {context + response} positions, "
            f"and {path} has {limit}: lower one of the two settings"
        )


class LocalPolicy:
    """Samples from the weights that are trained. If these are sharded, every rank keeps a whole copy for sampling.

    On a GPU the engine runs a `SamplingCopy` over these weights, whose steps have fewer kernels.
    """

    def __init__(self, config: RunConfig, root: PolicyRoot, tokenizer: Any, _: Path) -> None:
        self.root, self.version = root, -1
        self.whole = whole_copy(root, config.model.dtype) if is_sharded(root) else root.model
        self.copy: SamplingCopy | None = None
        if self.whole.device.type in DEVICES:
            self.copy = SamplingCopy(self.whole, root.adapter)
        self.model = self.whole if self.copy is None else self.copy.model
        length = config.tasks.max_context + config.sampling.max_tokens
        s = config.sampling
        self.engine = LocalEngine(self.model, tokenizer, slots=s.batch, max_length=length, fused=s.fused)

    def refresh(self, version: int) -> None:
        """From now on, sample with the weights after `version` updates.

        This drops the engine's cache of earlier prompts even if the weights are the same: a resumed run starts with an
        empty cache, and both runs must round alike.
        """
        with self.engine.updating(version):
            self.root.activate()
            if self.whole is not self.root.model and version != self.version:
                copy_weights(self.root, self.whole, frozen=self.version < 0)
            if self.copy is not None:
                self.copy.refresh()
        self.version = version

    def release(self) -> None:
        """Give the engine's cache back: scoring and the update need the room. On a GPU, one of up to `KEPT` stays."""
        device = next(self.model.parameters()).device
        if device.type != "cuda" or self.engine.cache_bytes > KEPT * torch.cuda.mem_get_info(device)[1]:
            self.engine.release()


class ServedPolicy:
    """Samples from vLLM servers. They load the weights of every update from the run directory and are verified then.

    With LoRA they load the student's adapter, on top of the base that they were started with.
    """

    def __init__(self, config: RunConfig, root: PolicyRoot, tokenizer: Any, run: Path) -> None:
        self.root, self.version = root, -1
        self.base, self.folder = config.model.student, run / "served"
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.temperature = config.sampling.temperature
        tasks = read_tasks(config.tasks.train or config.tasks.dev)[:PROMPTS]
        self.prompts = [prefix_of(tokenizer, user_message(task)) for task in tasks]
        self.engine = VllmEngine(config.sampling.servers, tokenizer, folder=self.folder)

    def refresh(self, version: int) -> None:
        """From now on, sample with the weights after `version` updates."""
        if version != self.version:
            with self.engine.updating():  # calls that are sampled ahead wait
                self._update(version)

    def _update(self, version: int) -> None:
        ranks.barrier()  # no rank has an open call any more
        self.version, first = version, ranks.rank() == 0
        weights = {name: value.to(self.dtype).cpu() for name, value in whole_weights(self.root) if first}
        if first and self.root.adapter is not None:
            written = self.folder / f"adapter-{version}"
            save_adapter(written, self.root.model, self.root.adapter, self.base, None, weights)
            self.engine.update(written, version)
        elif first:
            self.engine.update(weights, version)
        ranks.barrier()  # the engines of the other ranks get the version from the servers
        sampling = Sampling(temperature=self.temperature, max_tokens=TOKENS)  # the temperature of the tolerance
        self.engine.verify(self.score, self.prompts, tolerance=self._tolerance(), sampling=sampling)

    def release(self) -> None:
        """The servers have memory of their own."""

    def score(self, pairs: Sequence[tuple[Ids, Ids]], temperature: float) -> list[Floats]:
        """log p of the completions. One forward pass, because every rank must make the same number of passes."""
        packed = compile_calls([Call(prompt, completion) for prompt, completion in pairs])
        with torch.no_grad():
            logp, *_ = self.root(packed, temperature)
        sizes = [len(completion) for _, completion in pairs]
        return [part.double().cpu().numpy() for part in logp.split(sizes)]

    def _tolerance(self) -> float:
        """The tolerance for rounding, measured on the prompts with the current weights."""
        precise = whole_copy(self.root, name_of(MORE_PRECISE.get(self.dtype, torch.float64)))
        copy_weights(self.root, precise)

        def exact(pairs: Sequence[tuple[Ids, Ids]], temperature: float) -> list[Floats]:
            with torch.no_grad():
                found = packed_logprobs(precise, [Call(*pair) for pair in pairs], temperature=temperature)
            return [part.double().cpu().numpy() for part in found]

        halves = [(p[: len(p) // 2], p[len(p) // 2 :]) for p in self.prompts]
        return rounding_tolerance(self.score, exact, halves, self.temperature)
