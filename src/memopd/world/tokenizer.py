"""A byte-level BPE tokenizer trained on the texts it will see, in Hugging Face format.

The tags of the protocol (<think>, <search>, ...) are ordinary text, so an agent with another protocol can use the same
vocabulary. Every digit is a token of its own, so that a model copies and compares numbers digit by digit.

The vocabulary is small on purpose. A larger one would contain whole names, most of which are rare or absent in
training; a model can copy a name that it has never seen if the name consists of a few common syllables (docs/world.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL = (PAD, START, END)
SMALLEST = 256 + len(SPECIAL)  # every byte, so that any text can be encoded

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], size: int = 2048) -> PreTrainedTokenizerFast:
    """Train a tokenizer with exactly `size` tokens. The order of the texts does not matter."""
    if size <= SMALLEST:
        raise ValueError(f"a tokenizer needs more than {SMALLEST} entries, got {size!r}")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != size:
        raise ValueError(f"the texts give only {tokenizer.get_vocab_size()} entries, but the size must be {size}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
