"""Makes a Hugging Face folder in bfloat16 from a GGUF file: `python -m paper.dequantise FILE.gguf OUT`.

The bases of paper/real were made so, from files with 4 to 8 bits per weight. It needs the package gguf.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from memopd.cli.options import run
from memopd.files import whole_folder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

OF_THE_FILE = {
    "quantization_config", "_model_name_or_path", "model_type", "transformers_version", "architectures",
}  # fmt: skip


@app.command()
def dequantise(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file of a model with a tied embedding.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write to.")],
    template: Annotated[
        Path | None, typer.Option(help="A chat_template.jinja to use instead of the file's, for example the student's.")
    ] = None,
) -> None:
    """Write the model and the tokenizer of a GGUF file to a folder, and print the digest of the weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from memopd.models.adapters import base_digest

    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        read: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    except ImportError as error:
        raise ValueError(f"{file}: reading it needs the package gguf: {str(error).strip().splitlines()[0]}") from None
    settings = {key: value for key, value in read.config.to_dict().items() if key not in OF_THE_FILE}
    weights = read.state_dict()
    if "lm_head.weight" in weights:  # the file has the tied matrix twice, and the head's copy is finer
        weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    model = type(read)(type(read.config)(**settings | {"tie_word_embeddings": True})).to(torch.bfloat16)
    loaded = model.load_state_dict(weights, strict=False)
    if loaded.unexpected_keys or set(loaded.missing_keys) - {"lm_head.weight"}:
        raise ValueError(
            f"{file}: does not fit {type(read).__name__}: {[*loaded.unexpected_keys, *loaded.missing_keys]}"
        )
    model.tie_weights()
    if template is not None:
        tokenizer.chat_template = template.read_text()
    with whole_folder(output, replace=False) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    print(f"{output}: {base_digest(str(output))}")


if __name__ == "__main__":
    run(app)
