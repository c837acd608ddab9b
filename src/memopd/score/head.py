"""The vocabulary head of a model, separate from the model: it turns hidden states into the model's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from memopd.models.attention import own_attention
from memopd.models.load import backbone
from memopd.models.support import check_dropout


@dataclass(frozen=True, slots=True)
class Head:
    weight: Tensor  # [V, H]; tied to the embedding in some models
    bias: Tensor | None  # [V]
    scale: float = 1.0  # Granite divides its logits, Cohere multiplies them
    softcap: float | None = None  # Gemma 2: cap · tanh(logits / cap)

    def logits(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., V]"""
        logits = linear(states.to(self.weight.dtype), self.weight, self.bias)  # Mamba keeps float32 states
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


_checked: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def head_of(model: Any, check: bool = True) -> Head:
    """The head of a causal LM, checked once per model against the model's own logits.

    Model families differ in the steps after the last product. The check keeps us from scoring a new family wrongly
    without an error.
    """
    embeddings = model.get_output_embeddings()
    if embeddings is None:
        raise ValueError(f"{type(model).__name__} has no vocabulary head")
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    head = Head(
        embeddings.weight,
        getattr(embeddings, "bias", None),
        scale,
        getattr(config, "final_logit_softcapping", None),
    )
    if check and model not in _checked:
        _check(model, head)
        _checked[model] = True
    return head


@torch.no_grad()
def _check(model: Any, head: Head) -> None:
    check_dropout(model)  # otherwise two passes differ, and the error below would blame the head
    ids = torch.tensor([[1, 2, 3]], device=head.weight.device)
    with own_attention(model):
        expected = model(input_ids=ids, use_cache=False).logits.double()
        actual = head.logits(backbone(model)(input_ids=ids, use_cache=False).last_hidden_state).double()
    eps = max(torch.finfo(head.weight.dtype).eps, torch.finfo(torch.float32).eps)  # some models return float32
    off = (actual - expected).abs().max()
    if off > 4 * eps * expected.abs().max():  # NaN weights pass here, and other checks report them
        raise ValueError(
            f"{type(model).__name__} does more to its logits than memopd.score.head supports "
            f"(off by {off:.2g}): add it there"
        )
