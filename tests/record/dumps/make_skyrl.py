"""Write skyrl/*.pkl with SkyRL's own batch, padding, advantages and `dump_data`, on a CPU and without a model.

pip install torch==2.13.0 transformers==5.8.0 ray jaxtyping peft==0.18.1 cloudpathlib cachetools skyrl-gym loguru
pip install --no-deps skyrl==0.3.0
python tests/record/dumps/make_skyrl.py

complete.pkl is the batch that SkyRL makes of what was generated. `dump_data_batch` of the trainer writes the others,
after it has removed the rewards, the uids and is_last_step.
"""

from __future__ import annotations

import shutil
import typing
from pathlib import Path
from types import SimpleNamespace

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic asks for this before Python 3.12, and SkyRL uses the other

from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402

HERE = Path(__file__).parent / "skyrl"


def trainer(step_wise: bool) -> RayPPOTrainer:
    """Only what the methods below read: a whole one starts Ray's actors and needs a GPU."""
    made = RayPPOTrainer.__new__(RayPPOTrainer)
    made.cfg = SkyRLTrainConfig()
    made.cfg.trainer.export_path = str(HERE)
    made.cfg.trainer.train_batch_size = made.cfg.trainer.policy_mini_batch_size = 2
    made.cfg.generator.n_samples_per_prompt = 1 if step_wise else 2
    made.cfg.generator.step_wise_trajectories = step_wise
    made.tokenizer = SimpleNamespace(pad_token_id=0)
    made.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 4)
    made.all_metrics = {}
    return made


def batch(made: RayPPOTrainer, output: dict, uids: list[str]) -> TrainingInputBatch:
    data = made.convert_to_training_input(output, uids)
    data["values"] = None  # as without a critic
    return data


def dump(made: RayPPOTrainer, data: TrainingInputBatch, name: str) -> None:
    """The lines of `RayPPOTrainer.train` between the advantages and the dump."""
    data = made.compute_advantages_and_returns(data)
    for key in ["rewards"]:
        data.pop(key)
    data.metadata.pop("uids")
    data.metadata.pop("is_last_step", None)
    made.dump_data(data, file_name=name)


# Step by step: two calls that rewrite the context, then a trajectory of one call. SkyRL pads three rows to four.
STEPS = {
    "prompt_token_ids": [[11, 12, 13], [11, 12, 21, 22, 31], [11, 14]],
    "response_ids": [[21, 22, 2], [23, 2], [24, 25, 26, 2]],
    "rewards": [[0.0, 0.0, 0.25], [0.0, 1.0], [0.0, 0.0, 0.0, 0.5]],
    "loss_masks": [[1, 1, 1], [1, 1], [1, 1, 1, 1]],
    "rollout_logprobs": [[-0.1, -0.2, -0.3], [-0.4, -0.5], [-0.6, -0.7, -0.8, -0.9]],
    "is_last_step": [False, True, True],
}
# Whole trajectories: two samples of two prompts each; observations stand between the turns, one sample is filtered out.
WHOLE = {
    "prompt_token_ids": [[11, 12, 13]] * 2 + [[11, 14]] * 2,
    "response_ids": [[21, 2, 31, 32, 22, 23, 2], [24, 2], [25, 26, 2, 33, 27, 2], [28, 29]],
    "rewards": [[0.0] * 6 + [1.0], [0.0, 0.0], [0.0] * 5 + [1.0], [0.0, 0.0]],
    "loss_masks": [[1, 1, 0, 0, 1, 1, 1], [1, 1], [1, 1, 1, 0, 1, 1], [0, 0]],
    "rollout_logprobs": None,
}


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir()
    steps = trainer(step_wise=True)
    batch(steps, STEPS, ["p0", "p0", "p1"]).save(HERE / "complete.pkl")
    dump(steps, batch(steps, STEPS, ["p0", "p0", "p1"]), "global_step_1_training_input")
    whole = trainer(step_wise=False)
    dump(whole, batch(whole, WHOLE, ["p0", "p0", "p1", "p1"]), "global_step_2_training_input")


main()
