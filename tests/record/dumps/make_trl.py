"""Write trl/completions.parquet with TRL's own GRPOTrainer, which trains a tiny model for a step, on a CPU.

pip install torch==2.13.0 transformers==5.8.0 accelerate datasets trl==1.16.0
python tests/record/dumps/make_trl.py TOKENIZER

TOKENIZER is a folder with HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

HERE = Path(__file__).parent / "trl"


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=2,
                num_generations=2,
                max_completion_length=4,
                max_steps=1,
                logging_steps=1,
                log_completions=True,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["Who wrote it?", "Who sang it?"]}),
            processing_class=tokenizer,
        ).train()
        (written,) = Path(folder).rglob("*.parquet")
        HERE.mkdir(exist_ok=True)
        shutil.copy(written, HERE / "completions.parquet")


main()
