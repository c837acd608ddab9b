"""Write gen_batch.dp, numpy.dp, tq_batch.pt, outputs.jsonl and text.jsonl in verl/ with verl's own workers and writers.

pip install torch==2.13.0 transformers==5.8.0 'ray[default]' tensordict==0.10.0 TransferQueue torchdata hydra-core \
    codetiming dill peft accelerate datasets pylatexenc cachetools pillow wandb tensorboard
pip install --no-deps verl==0.9.1
python tests/record/dumps/make_verl.py TOKENIZER

TOKENIZER is a folder with HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer. A model is not needed: the agent loops'
outputs are given, and verl pads, collects and writes them as it does in training, on a CPU.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.skip.rollout_skip import RolloutSkip, RolloutTqSkip

HERE = Path(__file__).parent / "verl"
TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[1])


def output(prompt: list[int], response: list[int], mask: list[int], score: float | None) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=[-(k + 1) / 8 if m else 0.0 for k, m in enumerate(mask)],
        reward_score=score,
        num_turns=2 * sum(b > a for a, b in zip([0, *mask], mask, strict=False)),
        metrics=AgentLoopMetrics(),
        extra_fields={"reward_extra_info": {}, "min_global_steps": 3, "max_global_steps": 3},
    )


# Two turns with a tool's answer between them, one turn of another prompt, and one that a tool's answer cut off.
OUTPUTS = [
    output([11, 12, 13], [21, 2, 31, 32, 22, 23, 2], [1, 1, 0, 0, 1, 1, 1], 1.0),
    output([11, 14], [24, 25, 2], [1, 1, 1], 0.0),
    output([11, 12, 13], [26, 2, 33, 34], [1, 1, 0, 0], 0.5),
]
# A session with two outputs: the agent rewrote its context between them.
REWRITTEN = [
    output([11, 12, 13], [21, 2, 31, 32, 22, 2], [1, 1, 0, 0, 1, 1], None),
    output([11, 12, 21, 22], [23, 2], [1, 1], 0.75),
]


def bare(cls: type, **attributes: object) -> object:
    """Only what the methods below read: a whole worker or trainer starts Ray's actors and needs a GPU."""
    made = cls.__new__(cls)
    made.__dict__.update(attributes)
    return made


def worker(cls: type) -> object:
    lengths = SimpleNamespace(prompt_length=6, response_length=9)
    return bare(
        cls,
        tokenizer=TOKENIZER,
        processor=None,
        mm_processor_kwargs=None,
        rollout_config=lengths,
        reward_loop_worker_handles=None,
        distillation_enabled=False,
        config=OmegaConf.create({}),
    )


def config(folder: str) -> tuple[object, object]:
    whole = {"trainer": {"v1": {"trainer_mode": "sync"}}, "data": {"train_batch_size": 3}}
    return SimpleNamespace(action="cache", enable=True, dump_dir=folder, steps=[1]), OmegaConf.create(whole)


async def padded(loops: AgentLoopWorker) -> object:
    raw = np.empty(len(OUTPUTS), dtype=object)
    raw[:] = [[{"role": "user", "content": "Who?"}]] * len(OUTPUTS)
    made = [
        await loops._agent_loop_postprocess(o.model_copy(deep=True), False, raw_prompt=r)
        for o, r in zip(OUTPUTS, raw, strict=True)
    ]
    uids = np.array(["p0", "p1", "p0"], dtype=object)
    return loops._postprocess(made, input_non_tensor_batch={"uid": uids, "raw_prompt": raw})


async def queued(loops: AgentLoopWorkerTQ) -> None:
    sessions = [("p0", 0, REWRITTEN), ("p0", 1, OUTPUTS[2]), ("p1", 0, OUTPUTS[1])]
    for uid, session, made in sessions:
        await loops._agent_loop_postprocess(made, False, uid=uid, session_id=session, global_steps=1)


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    lines = (o.model_dump_json() for o in OUTPUTS)
    (HERE / "outputs.jsonl").write_text("".join(line + "\n" for line in lines))

    batch = asyncio.run(padded(worker(AgentLoopWorker)))
    with tempfile.TemporaryDirectory() as folder:
        RolloutSkip(*config(folder)).prepare_data(1, batch)
        (written,) = Path(folder).rglob("gen_batch.dp")
        shutil.copy(written, HERE)
    os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = "numpy"
    batch.save_to_disk(HERE / "numpy.dp")
    del os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"]

    batch.batch["token_level_scores"] = batch.batch["rm_scores"]
    trainer = bare(RayPPOTrainer, tokenizer=TOKENIZER, global_steps=1)
    trainer._init_dump_executor()
    trainer._log_rollout_data(batch, {}, {}, str(HERE))
    trainer._shutdown_dump_executor()
    (HERE / "1.jsonl").rename(HERE / "text.jsonl")

    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 << 20)  # the queue's actors are processes
    tq.init()
    asyncio.run(queued(worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class)))
    keys = ["p0_0_0", "p0_0_1", "p0_1_0", "p1_0_0"]
    meta = SimpleNamespace(keys=keys, tags=[{"status": "success", "global_steps": 1}] * 4, partition_id="train")
    with tempfile.TemporaryDirectory() as folder:
        RolloutTqSkip(*config(folder)).prepare_data(1, meta, global_steps=1)
        (written,) = Path(folder).rglob("tq_batch.pt")
        shutil.copy(written, HERE)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
