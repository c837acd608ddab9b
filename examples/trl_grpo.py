"""TRL's GRPO trainer with packed scoring: a prompt is computed once for all of its completions. Needs trl 1.16.

pip install trl==1.16.0
python examples/trl_grpo.py models/student runs/trl
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import memopd


class PackedGRPOTrainer(GRPOTrainer):
    """TRL asks this method for π_θ, π_old and π_ref. Everything else stays TRL's."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **other
    ):
        if self.accelerator.num_processes > 1:
            raise ValueError("packed scoring does not go through DDP's forward: run TRL in one process")
        if unsupported := [name for name, value in other.items() if value is not None and value is not False]:
            raise ValueError(f"packed scoring takes token ids alone, not {', '.join(unsupported)}")
        rows = batch_size or len(input_ids)  # TRL's bound on memory, in rows of this batch
        with self.accelerator.autocast():
            logprobs, entropies = memopd.packed_rows(
                self.accelerator.unwrap_model(model),
                input_ids,
                attention_mask,
                logits_to_keep,
                temperature=self.temperature,
                budget=rows * input_ids.shape[1],
            )
        return logprobs, entropies if compute_entropy else None, None


def shorter_is_better(completions, **_):
    return [-float(len(text)) for text in completions]


def main(model: str, output: str) -> None:
    prompts = ["Where was the author of the book born?", "Which river runs through the town, and where does it end?"]
    settings = GRPOConfig(
        output_dir=output,
        num_generations=8,
        per_device_train_batch_size=16,  # whole groups in one batch: what is not in it cannot be shared
        max_completion_length=32,
        max_steps=3,
        logging_steps=1,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
    )
    trainer = PackedGRPOTrainer(
        model, shorter_is_better, args=settings, train_dataset=Dataset.from_dict({"prompt": prompts})
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
