"""One arm of `benchmarks step`, in a process of its own: the training loop of the memopd on this process's path.

    PYTHONPATH=TREE/src python benchmarks/step_arm.py CONFIG.json FOLDER STEPS [--profile] [--wait]

It runs `memopd.train.train.train` and hooks two methods of its run directory, `stage` and `metrics`: they note seconds,
peaks of memory, and with --profile the kernels. It stops after the metrics of the last step, before checkpoints and
exports. FOLDER/arm.json has what was noted. With --wait it writes FOLDER/ready after the first step, and goes on when
FOLDER/go is there. The file imports nothing of `benchmarks`, because another tree's memopd may be on the path.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from memopd.config import from_tables
from memopd.train import log as run_log
from memopd.train import train as loop


class Done(Exception):
    """All steps were measured."""


class Notes:
    """What the hooks note. A step is a dictionary of seconds and peak bytes by stage, and of its wall seconds."""

    def __init__(self, steps: int, profile: bool, warm: Callable[[], None] = lambda: None) -> None:
        self.steps, self.profile, self.warm = steps, profile, warm
        self.now: dict[str, dict[str, float]] = {}
        self.done: list[dict[str, Any]] = []
        self.begin = 0.0
        self.learner: Any = None
        self.engine: Any = None
        self.at_rest = self.before_sampling = 0
        self.memory: dict[str, int] = {}
        self.kernels: dict[str, dict[str, Any]] = {}
        self.decodes: list[tuple[int, int, int, float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        last = len(self.done) == self.steps - 1  # the profiled one
        at = _reset()
        if name == "sample" and not self.done:
            self.before_sampling = at
        if name == "update":
            self.at_rest = at
        begin = time.perf_counter()
        with kernels(self.kernels, name) if self.profile and last else nullcontext():
            yield
            _sync()
        into = self.now.setdefault(name, {"seconds": 0.0, "peak_bytes": 0})
        into["seconds"] += time.perf_counter() - begin
        into["peak_bytes"] = max(into["peak_bytes"], _peak())
        if name == "sample" and not self.done:
            self.memory["cache_bytes"] = max(0, _allocated() - self.before_sampling)
        if name == "update":
            self.memory["activation_bytes"] = max(0, _peak() - self.at_rest)

    def metrics(self, values: dict[str, float]) -> None:
        now = time.perf_counter()
        self.done.append({"seconds": now - self.begin, "stages": self.now, "metrics": values})
        if len(self.done) >= self.steps:
            raise Done
        if len(self.done) == 1:
            self.warm()
            now = time.perf_counter()
        self.now, self.begin = {}, now


def hook(notes: Notes) -> None:
    """Let the run directory tell `notes` of stages and metrics, and keep the learner and the sampler."""
    stage, metrics = run_log.Run.stage, run_log.Run.metrics
    build, open_source = vars(loop)["build"], vars(loop)["open_source"]

    @contextmanager
    def noted_stage(self: Any, name: str) -> Iterator[None]:
        with notes.stage(name), stage(self, name):
            yield

    def noted_metrics(self: Any, step: int, values: dict[str, float]) -> None:
        metrics(self, step, values)
        notes.metrics({k: v for k, v in values.items() if isinstance(v, int | float)})

    def kept_build(*arguments: Any, **options: Any) -> Any:
        notes.learner = build(*arguments, **options)
        return notes.learner

    def kept_source(*arguments: Any, **options: Any) -> Any:
        source = open_source(*arguments, **options)
        policy = getattr(source, "policy", None)
        notes.engine = getattr(policy, "engine", None)
        notes.begin = time.perf_counter()
        return source

    run_log.Run.stage, run_log.Run.metrics = noted_stage, noted_metrics  # type: ignore[method-assign]
    loop.build, loop.open_source = kept_build, kept_source  # type: ignore[attr-defined]


# ---- memory by part ----------------------------------------------------------------------------------------------


def memory_of(notes: Notes) -> dict[str, int]:
    learner, model = notes.learner, getattr(notes.engine, "model", None)
    roots = (learner.student, learner.critic, learner.reference, learner.teacher)
    held = [p for root in roots if root is not None for p in root.parameters()]
    held += [] if learner.head is None else [learner.head.weight]
    kind = learner.device.type
    ours = {p.data_ptr() for p in held}
    copied = [] if model is None else [p for p in model.parameters() if p.data_ptr() not in ours]
    groups = learner.tensors()
    optimisers = [t for name, group in groups.items() if name.endswith("-optimiser") for t in group.values()]
    return {
        "trained": sum(t.numel() for name in ("student", "critic") for t in groups.get(name, {}).values()),
        "weights_bytes": bytes_of(p for p in held if p.device.type == kind),
        "host_bytes": bytes_of(p for p in held if p.device.type != kind),
        "copy_bytes": bytes_of(copied),
        "optimiser_bytes": bytes_of(optimisers),
        **notes.memory,
    }


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors. Shared storage counts once."""
    local = [t.to_local() if isinstance(t, DTensor) else t.detach() for t in tensors]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


# ---- a profile ---------------------------------------------------------------------------------------------------

CLASSES = {  # of kernels, by what their names contain; the first that matches
    "attention": ("flash", "fmha", "attention", "attend", "_decode", "sdpa"),
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "xmma", "::mm", "addmm", "bmm", "linear", "matmul"),
    "copies and indexing": ("copy", "memcpy", "memset", "index", "gather", "scatter", "cat", "embedding"),
    "optimiser": ("adam", "multi_tensor", "foreach"),
    "fused by Triton": ("triton", "fused"),
    "reductions": ("reduce", "softmax", "sum", "norm", "scan", "sort", "topk"),
    "elementwise": ("elementwise", "vectorized", "pow", "mul", "add", "silu", "fill"),
}


def class_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, words in CLASSES.items() if any(w in low for w in words)), "other")


@contextmanager
def kernels(into: dict[str, dict[str, Any]], stage: str) -> Iterator[None]:
    """Sum up the kernels of a stage; on a CPU, its operators. CUDA graphs and other threads are included on a GPU."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    begin = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as made:
        yield
        _sync()
    wall = time.perf_counter() - begin
    by_name: dict[str, list[float]] = {}
    if cuda:  # the raw events: hundreds of thousands of kernels take long as objects of Python
        for event in made.profiler.kineto_results.events():
            if event.device_type() == DeviceType.CUDA:
                total = by_name.setdefault(event.name(), [0, 0.0])
                total[0] += 1
                total[1] += event.duration_ns() / 1e9
    else:
        for average in made.key_averages():
            by_name[average.key] = [average.count, average.self_cpu_time_total / 1e6]
    into[stage] = summary(by_name, wall)


def summary(by_name: dict[str, list[float]], wall: float) -> dict[str, Any]:
    """Seconds by class, and the twenty names that take longest."""
    classes: dict[str, float] = {}
    for name, (_, seconds) in by_name.items():
        classes[class_of(name)] = classes.get(class_of(name), 0.0) + seconds
    top = sorted(by_name.items(), key=lambda item: -item[1][1])[:20]
    return {
        "wall": wall,
        "classes": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "top": [{"name": name[:120], "count": int(n), "seconds": s} for name, (n, s) in top],
    }


def hook_decoder(notes: Notes) -> None:
    """Note every batch of decoding steps: sequences, tokens in their caches, steps, seconds."""
    from memopd.engine.local import graphs

    decode = graphs.Decoder.decode

    def noted(self: Any, rows: Any, steps: int) -> Any:
        cached = sum(r.position for r in rows)
        captured = len(self.graphs)
        begin = time.perf_counter()
        made = decode(self, rows, steps)  # ends when the host has the tokens
        if len(self.graphs) == captured:  # the first batch of a size also captures its graph
            notes.decodes.append((len(rows), cached, steps, time.perf_counter() - begin))
        return made

    graphs.Decoder.decode = noted  # type: ignore[method-assign]


def sampler_bound(notes: Notes) -> list[dict[str, float]]:
    """Per number of running sequences: measured time of a step, and the time to read weights and caches once."""
    model = getattr(notes.engine, "model", None)
    if model is None or not notes.decodes:
        return []
    bandwidth, weights, per_token = copy_bandwidth(), decoded_bytes(model), cache_bytes(model)
    sizes: dict[int, list[float]] = {}
    for live, cached, steps, seconds in notes.decodes:
        total = sizes.setdefault(1 << (live - 1).bit_length(), [0.0] * 4)
        read = sum(weights + per_token * (cached + live * i) for i in range(steps))
        for i, value in enumerate((steps, live * steps, read, seconds)):
            total[i] += value
    return [
        {
            "sequences": size, "steps": n, "mean_live": live / n, "seconds": seconds, "step_ms": 1e3 * seconds / n,
            "bound_ms": 1e3 * read / n / bandwidth, "of_bound": seconds * bandwidth / read,
            "bandwidth": bandwidth, "weights_bytes": weights,
        }
        for size, (n, live, read, seconds) in sorted(sizes.items())
    ]  # fmt: skip


def decoded_bytes(model: Any) -> int:
    """The weights that a step reads. Of an embedding that is not also the head it reads a few rows only."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    left_out = 0 if embedding.data_ptr() == head.data_ptr() else embedding.numel() * embedding.element_size()
    return bytes_of(model.parameters()) - left_out


def cache_bytes(model: Any) -> int:
    """Of keys and values of one token."""
    c = model.config.get_text_config()
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return int(2 * c.num_hidden_layers * c.num_key_value_heads * width * model.dtype.itemsize)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    for _ in range(3):
        b.copy_(a)
    _sync()
    begin = time.perf_counter()
    for _ in range(20):
        b.copy_(a)
    _sync()
    return 20 * 2 * a.numel() / (time.perf_counter() - begin)


# ---- the device --------------------------------------------------------------------------------------------------


def _sync() -> None:
    """Wait for this thread's work. An engine that samples in a thread of its own goes on."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _reset() -> int:
    if torch.cuda.is_available():
        _sync()
        torch.cuda.reset_peak_memory_stats()
    return _allocated()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def main(config_file: str, folder: str, steps: str, *flags: str) -> None:
    config = from_tables(json.loads(Path(config_file).read_text()), config_file)
    profile = "--profile" in flags
    output = Path(folder)

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the arms that go on meanwhile need the memory
        (output / "ready").touch()
        while not (output / "go").exists():
            time.sleep(0.05)

    warm = wait if "--wait" in flags else lambda: None
    notes = Notes(int(steps) + profile, profile, warm)  # the profiled step is one more
    hook(notes)
    if notes.profile and torch.cuda.is_available():
        hook_decoder(notes)
    with suppress(Done):
        loop.train(config, output / "run")
    result = {
        "steps": notes.done[: int(steps)],
        "memory": memory_of(notes),
        "kernels": notes.kernels,
        "sampler": sampler_bound(notes),
    }
    (output / "arm.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
