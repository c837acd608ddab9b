"""TRL's GRPO with packed scoring is TRL's GRPO: the same numbers, gradients and weights.

Three trainers sample the same completions and take the same three steps: TRL as it comes and with
examples/trl_grpo.py, both in float32, and with every row alone in float64. As in `verify`, packed may be at most twice
as far from float64 as TRL itself is.
"""

import runpy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from memopd.compile import Packed, fill
from memopd.models.attention import NAME

ROOT = Path(__file__).parent.parent.parent
PackedGRPOTrainer = runpy.run_path(str(ROOT / "examples" / "trl_grpo.py"))["PackedGRPOTrainer"]
PROMPTS = [
    "Where was the author of the book born?",
    "Which river runs through the town, and where does it end?",
    "Who?",
    "Which of the two companies is older?",
]


class AloneGRPOTrainer(GRPOTrainer):
    """The definition: a pass per row, without padding."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_
    ):
        logps, entropies = (torch.zeros(len(input_ids), logits_to_keep, dtype=torch.float64) for _ in range(2))
        for i, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            n = int(mask[-logits_to_keep:].sum())
            row = ids[mask]
            every = (model(row[None]).logits[0, -n - 1 : -1] / self.temperature).log_softmax(-1)
            logps[i, :n] = every.gather(-1, row[-n:, None])[:, 0]
            entropies[i, :n] = -(every.exp() * every).sum(-1)
        return logps, entropies if compute_entropy else None, None


class Gradients(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.steps.append(flat(p.grad for p in model.parameters() if p.grad is not None))


def flat(tensors) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def write_policy(folder) -> None:
    """Random, and sure enough of itself that some completions end early."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "student")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight *= 20
        model.lm_head.weight[tokenizer.eos_token_id] *= 3
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(kind, dtype, folder, lora=False) -> dict[str, list[torch.Tensor] | str]:
    """What three steps computed: everything that was scored, in order, and what it did to the weights."""
    scored = []

    class Recorded(kind):
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            out = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            scored.append((args[0], args[1], *out[:2]))
            return out

    settings = GRPOConfig(
        output_dir=str(folder / "run"), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, num_generations=4, per_device_train_batch_size=8, steps_per_generation=2, max_steps=3,
        max_completion_length=10, temperature=0.8, beta=0.04, entropy_coef=0.1, learning_rate=1e-3, seed=3,
    )  # fmt: skip
    gradients = Gradients()
    trainer = Recorded(
        str(folder), lambda completions, **_: [float(len(set(text))) for text in completions], args=settings,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}), callbacks=[gradients],
        peft_config=LoraConfig(r=4, init_lora_weights=False) if lora else None,
    )  # fmt: skip
    model = trainer.model.to(dtype)
    if not lora:  # where the reference is the model without its adapters
        trainer.ref_model.to(dtype)
    start = flat(model.parameters())
    trainer.train()
    return {
        "ids": [ids for ids, *_ in scored],
        "masks": [mask for _, mask, *_ in scored],
        "logprobs": [logps.detach().double() for *_, logps, _ in scored],
        "entropies": [e.detach().double() for *_, e in scored if e is not None],
        "gradients": gradients.steps,
        "change": [flat(model.parameters()) - start],
        "attention": model.config._attn_implementation,
    }


# ---- the comparison ------------------------------------------------------------------------------------------


QUANTITIES = ["logprobs", "entropies", "gradients", "change"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl")
    write_policy(path)
    return path


@pytest.fixture(scope="module")
def stock(folder):
    return {lora: train(GRPOTrainer, torch.float32, folder, lora) for lora in (False, True)}


@pytest.fixture(scope="module")
def alone(folder):
    return {lora: train(AloneGRPOTrainer, torch.float64, folder, lora) for lora in (False, True)}


def packed_run(folder, lora=False, change=lambda packed: packed):
    """Packed training, and how many rows each pack had."""
    sizes = []

    def changed(calls, budget):
        packs = fill(calls, budget)
        sizes.append(sum(map(len, packs)))
        return [change(packed) for packed in packs]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("memopd.score.score"), "fill", changed)
        return train(PackedGRPOTrainer, torch.float32, folder, lora), sizes


def error(run, exact, quantity: str, until=None) -> torch.Tensor:
    """The distance from float64, over all that was computed until then."""
    return (flat(run[quantity][:until]) - flat(exact[quantity][:until])).norm()


@pytest.mark.parametrize("lora", [False, True])
def test_three_steps_are_those_of_trl(lora, folder, stock, alone):
    stock, alone = stock[lora], alone[lora]
    packed, sizes = packed_run(folder, lora)
    for what in ("ids", "masks"):
        assert all(map(torch.equal, packed[what], stock[what]))
        assert all(map(torch.equal, packed[what], alone[what]))
    masks = torch.cat([mask.flatten(1) for mask in packed["masks"][:1]])
    assert (masks[:, 0] == 0).any()  # prompts of different lengths, and completions too
    assert len(masks[:, -10:].sum(1).unique()) > 3
    assert [len(packed[what]) for what in QUANTITIES] == [7, 3, 3, 1]
    assert sum(sizes) < 0.8 * sum(int(mask.sum()) for mask in packed["masks"])  # shared, not only right
    assert packed["attention"] == NAME  # TRL checkpoints gradients, so that it sampled with our name for sdpa
    for quantity in QUANTITIES:
        assert error(packed, alone, quantity) <= 2 * error(stock, alone, quantity), quantity
        assert error(stock, alone, quantity) < 1e-3 * flat(alone[quantity]).norm()  # and TRL is right


def shifted(packed: Packed) -> Packed:
    """The last token that is read stands one position too far."""
    positions = packed.positions.copy()
    positions[-1] += 1
    return replace(packed, positions=positions)


def widened(packed: Packed) -> Packed:
    """The rows after a branch see its first row."""
    ends = packed.exit.copy()
    ends[(ends < len(packed)).argmax()] += 1
    return replace(packed, exit=ends)


@pytest.mark.parametrize("corrupt", [shifted, widened])
def test_a_corrupted_plan_is_noticed_everywhere(corrupt, folder, stock, alone):
    stock, alone = stock[False], alone[False]
    packed, _ = packed_run(folder, change=corrupt)
    assert torch.equal(packed["ids"][0], stock["ids"][0])
    for quantity in QUANTITIES:
        assert error(packed, alone, quantity, 1) > 10 * error(stock, alone, quantity, 1), quantity


def test_the_example_is_short():
    text = (ROOT / "examples" / "trl_grpo.py").read_text()
    assert len(text[text.index("class PackedGRPOTrainer") : text.index("def shorter_is_better")].split("\n")) <= 30


def test_what_packing_does_not_do_is_refused(folder):
    trainer = PackedGRPOTrainer.__new__(PackedGRPOTrainer)
    trainer.accelerator = type("One", (), {"num_processes": 1})()
    ids = torch.ones(1, 4)
    with pytest.raises(ValueError, match="token ids alone, not pixel_values"):
        trainer._get_per_token_logps_and_entropies(None, ids, ids, 2, pixel_values=ids, num_images=None)
    trainer.accelerator.num_processes = 2
    with pytest.raises(ValueError, match="run TRL in one process"):
        trainer._get_per_token_logps_and_entropies(None, ids, ids, 2)
