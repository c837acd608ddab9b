"""A byte-level BPE tokenizer trained on the texts it will see, in Hugging Face format.

The tags of the protocol (<think>, <search>, ...) are ordinary text: an agent with another protocol needs no other
vocabulary, and a tag is found in a response as text. Digits stand alone, so that a number is copied and compared digit
by digit.

The size is small on purpose. A larger vocabulary soon holds whole names, most of them of things that are rarely or
never seen in training; a name in a few common syllables can be copied by who has never seen it (docs/world.md).
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
    """Exactly `size` tokens; the same texts, in any order, give the same ones."""
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
        raise ValueError(f"the texts make only {tokenizer.get_vocab_size()} entries, {size} were asked for")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
