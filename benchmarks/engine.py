"""The local engine against transformers' own ways to sample and vLLM: the same prompts, the same numbers of tokens, one
run.

Prompts and completions have very different lengths, as those of agents do. Every arm samples exactly as many tokens for
a prompt as the others, and only these are counted. Prompts share no prefix, so no arm gains from cached prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from memopd.engine import Request
from memopd.engine.local import LocalEngine
from memopd.types import Sampling

VOCABULARY = 4096
SHAPES: dict[str, dict[str, Any]] = {  # Qwen2, as the embedded world's student and teacher
    "3m": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6,
           "num_key_value_heads": 2},
    "10m": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8, "num_attention_heads": 10,
            "num_key_value_heads": 2},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineArm:
    name: str
    seconds: float  # median
    spread: float  # (slowest − fastest) / median
    processor_seconds: float  # of CPU time, median, which other work on the machine does not change
    tokens_per_second: float  # sampled tokens
    speedup: float  # against the fastest arm of transformers' generate
    note: str = ""  # the reason, if it was not measured


@dataclass(frozen=True, slots=True)
class EngineResult:
    engine_model: str
    parameters: int
    prompts: int
    prompt_tokens: int
    shortest: int
    longest: int
    sampled_tokens: int
    most_sampled: int  # for one prompt
    threads: int
    arms: tuple[EngineArm, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Work:
    prompts: list[np.ndarray[Any, Any]]
    tokens: list[int]  # to sample for each

    @property
    def longest(self) -> int:
        return max(len(p) + n for p, n in zip(self.prompts, self.tokens, strict=True))

    def batches(self, size: int) -> list[Work]:
        """Batches by prompt length, which is known beforehand, unlike the number of tokens that will be sampled."""
        order = sorted(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        parts = [order[at : at + size] for at in range(0, len(order), size)]
        return [Work([self.prompts[i] for i in part], [self.tokens[i] for i in part]) for part in parts]


def work_of(prompts: int = 64, shortest: int = 20, longest: int = 600, most: int = 200, seed: int = 0) -> Work:
    """Random ids, with prompt lengths uniform in shortest .. longest and completion lengths in 8 .. most."""
    rng = np.random.default_rng(seed)
    sizes, tokens = rng.integers(shortest, longest + 1, prompts), rng.integers(8, most + 1, prompts)
    return Work([rng.integers(3, VOCABULARY, n).astype(np.int32) for n in sizes], tokens.tolist())


def world_model(name: str, dtype: torch.dtype, device: str) -> Any:
    """A Qwen2 of the embedded world's size, random weights, no end-of-sequence token."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    if name not in SHAPES:
        raise ValueError(f"unknown model size {name!r}: choose from {', '.join(SHAPES)}")
    torch.manual_seed(0)
    config = Qwen2Config(
        **SHAPES[name], vocab_size=VOCABULARY, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=None
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id = None
    return model.to(device).eval()


def run_engine(
    name: str,
    dtype: torch.dtype,
    device: str,
    repeats: int = 3,
    compiled: bool = True,
    vllm: Path | None = None,
    work: Work | None = None,
) -> EngineResult:
    """Measure all arms. With `compiled`, a GPU also runs transformers' static cache with a compiled step, which takes a
    minute to compile. `vllm` is an interpreter that has vLLM, with which a server is started."""
    work = work_of() if work is None else work
    model, count = world_model(name, dtype, device), len(work.prompts)
    ways: Ways = {f"transformers generate, batch {count}": lambda: generate(model, work)}
    if device == "cpu":  # padding costs a CPU more than further batches do
        for part in (count // 2, count // 4):
            way = partial(by_length, model, work, part)
            ways[f"transformers generate, batches of {part} by length"] = way
    elif compiled:
        ways[f"transformers generate, batch {count}, static cache, compiled"] = lambda: generate(model, work, "static")
    ways[f"memopd, {count // 4} slots"] = sampler(model, work, count // 4)
    ways[f"memopd, {count} slots"] = sampler(model, work, count)
    times, failed = _rounds(ways, repeats)
    # These run separately, because their threads and processes would slow down the other arms.
    apart = {"transformers continuous batching": continuous(model, work)}
    if vllm is not None:
        from benchmarks.engine_vllm import served

        apart["vLLM"] = served(model, work, vllm)
    for arm, opening in apart.items():
        try:
            with opening as ways:
                some, wrong = _rounds(ways, repeats)
        except Exception as why:  # it could not be started
            some, wrong = {}, {arm: _reason(why)}
        times, failed = times | some, failed | wrong
    best = min(median(t[0] for t in some) for arm, some in times.items() if "generate" in arm)
    sampled = sum(work.tokens)
    return EngineResult(
        engine_model=name,
        parameters=sum(p.numel() for p in model.parameters()),
        prompts=count,
        prompt_tokens=sum(map(len, work.prompts)),
        shortest=min(map(len, work.prompts)),
        longest=max(map(len, work.prompts)),
        sampled_tokens=sampled,
        most_sampled=max(work.tokens),
        threads=torch.get_num_threads(),
        arms=tuple(_arm(arm, times.get(arm), failed.get(arm, ""), sampled, best) for arm in [*times, *failed]),
    )


Ways = dict[str, Callable[[], None]]  # arms by name
Times = list[tuple[float, float]]  # wall time and CPU time


def _rounds(ways: Ways, repeats: int) -> tuple[dict[str, Times], dict[str, str]]:
    """The seconds of every arm, and the errors of failed ones. Arms take turns, so that a slowdown affects all."""
    times: dict[str, Times] = {arm: [] for arm in ways}
    failed: dict[str, str] = {}
    for _ in range(repeats + 1):
        for arm, way in ways.items():
            if arm in failed:
                continue
            try:
                times[arm].append(_seconds(way))
            except Exception as why:  # an arm that fails is reported with its error, and the others still count
                failed[arm] = _reason(why)
    return {arm: some[1:] for arm, some in times.items() if arm not in failed}, failed  # the first round warms up


def _reason(why: Exception) -> str:
    return f"{type(why).__name__}: {why}".splitlines()[0]


def _arm(name: str, times: Times | None, note: str, sampled: int, best: float) -> EngineArm:
    if times is None:
        nan = float("nan")
        return EngineArm(name, nan, nan, nan, nan, nan, note)
    wall, processor = ([t[i] for t in times] for i in (0, 1))
    seconds, elsewhere = median(wall), name.startswith("vLLM")  # in processes of its own
    spread = (max(wall) - min(wall)) / seconds
    spent = float("nan") if elsewhere else median(processor)
    return EngineArm(name, seconds, spread, spent, sampled / seconds, best / seconds)


def _seconds(work: Callable[[], None]) -> tuple[float, float]:
    start, processor = time.perf_counter(), time.process_time()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - processor


# ---- the arms -------------------------------------------------------------------------------------------------------


def sampler(model: Any, work: Work, slots: int) -> Callable[[], None]:
    """Our engine, with log-probabilities."""
    engine = LocalEngine(model, None, slots=slots, max_length=work.longest)
    rounds = iter(range(10**9))

    def run() -> None:
        engine.version = next(rounds)  # as after an update: the keys and values of the last round are invalid
        requests = [
            Request(p, seed=i, sampling=Sampling(max_tokens=n))
            for i, (p, n) in enumerate(zip(work.prompts, work.tokens, strict=True))
        ]
        made = [len(c.tokens) for c in engine.generate(requests)]
        assert made == work.tokens

    return run


def by_length(model: Any, work: Work, size: int) -> None:
    for part in work.batches(size):
        generate(model, part)


def generate(model: Any, work: Work, cache: str | None = None) -> None:
    """One batch, padded on the left as transformers requires. Every row ends at its own count and then pads until the
    last one has ended. It computes no log-probabilities, which would take more time."""
    from transformers import StoppingCriteriaList

    width, rows, device = max(map(len, work.prompts)), len(work.prompts), model.device
    ids, mask = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.int64)
    for row, prompt in enumerate(work.prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
    counts = torch.as_tensor(work.tokens, device=device)

    def ended(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids.shape[1] - width >= counts

    model.generate(
        input_ids=torch.as_tensor(ids, device=device),
        attention_mask=torch.as_tensor(mask, device=device),
        do_sample=True,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(work.tokens),
        pad_token_id=0,
        cache_implementation=cache,
        stopping_criteria=StoppingCriteriaList([ended]),
    )


@contextmanager
def continuous(model: Any, work: Work) -> Iterator[Ways]:
    """transformers' continuous batching with log-probabilities and one manager for all rounds. Blocks are not shared,
    because the next round has the same prompts."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    most = max(work.tokens)
    sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=most)
    config = ContinuousBatchingConfig(
        return_logprobs=True, max_requests_per_batch=len(work.prompts), allow_block_sharing=False
    )
    if not torch.cuda.is_available():  # on a GPU it measures how much memory it may use
        config.num_blocks, config.max_batch_tokens = 4 * len(work.prompts), 1024
    before = model.config._attn_implementation
    managers: list[Any] = []

    def run() -> None:
        if not managers:
            managers.append(model.init_continuous_batching(sampling, config))
            with torch.no_grad():
                managers[0].warmup()
            managers[0].start()
        for i, (prompt, count) in enumerate(zip(work.prompts, work.tokens, strict=True)):
            managers[0].add_request(prompt.tolist(), request_id=str(i), max_new_tokens=count)
        done = 0
        while done < len(work.prompts):
            result = managers[0].get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError(f"no answer: {result and result.error}")
            done += bool(result.is_finished())

    try:
        yield {"transformers continuous batching": run}
    finally:
        for manager in managers:
            manager.stop(block=True, timeout=10)
            manager.destroy()
        model.set_attn_implementation(before)
