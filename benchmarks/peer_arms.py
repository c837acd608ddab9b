"""How each peer lays out and runs the same calls: split and merged rows, PrefixGrouper, TRL's trie, and MemOPD.

The peers' own code is installed and called; nothing of it is copied. It takes attention from flash-attn or from a hub
of kernels. Here one operator stands under every arm: `varlen`, which calls torch's FlashAttention on GPUs in half
precision. So the arms differ in the rows they compute and in what they do around that operator.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.shapes import independent, merged_rows
from memopd.attention import make_plan
from memopd.attention.varlen import Segments, backward, forward
from memopd.compile import Packed, compile_calls
from memopd.models.attention import NAME, planned_attention
from memopd.models.load import backbone
from memopd.score import head_of, vocabulary_scores
from memopd.types import Call, Episode


@dataclass(frozen=True, slots=True)
class Ready:
    """Calls that were laid out for a model. `logprobs` computes log p of every sampled token, in the calls' order."""

    rows: int  # that the layers compute, padding included
    attention: str  # the name of the attention that the model must be set to
    logprobs: Callable[[], Tensor]


Build = Callable[[Any, Sequence[Episode]], Ready]


def calls_of(episodes: Sequence[Episode]) -> list[Call]:
    return [c for e in episodes for c in e.calls]


# ---- one attention operator for all ------------------------------------------------------------------------------


@torch.library.custom_op("benchmarks::varlen", mutates_args=())
def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention, aligned at the end, over segments. As an operator, so that compiled layers can contain it."""
    return forward(q, k, v, Segments(cu_q, cu_k, torch.tensor([max_q, max_k, 1])), scale, None)


@torch.library.custom_op("benchmarks::varlen_backward", mutates_args=())
def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor,
    max_q: int, max_k: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    segments = Segments(cu_q, cu_k, torch.tensor([max_q, max_k, 1]))
    return backward(grad, q, k, v, out, lse, segments, scale, None)


@varlen.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    precise = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=precise)


@varlen_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *varlen_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest), None, None, None, None, None


varlen.register_autograd(_gradients, setup_context=_save)


# ---- rows of our compiler: split, merged, packed -----------------------------------------------------------------


def split(model: Any, episodes: Sequence[Episode]) -> Ready:
    """Every call is a row of one unpadded batch."""
    return _planned(model, independent(episodes), "cascade")


def merged(model: Any, episodes: Sequence[Episode]) -> Ready:
    """Calls that extend a former call's prompt and completion become one row."""
    return _planned(model, merged_rows(episodes), "cascade")


def memopd(model: Any, episodes: Sequence[Episode]) -> Ready:
    return _planned(model, compile_calls(calls_of(episodes)), "auto")


def _planned(model: Any, packed: Packed, kernel: str) -> Ready:
    plan, device = make_plan(packed, kernel, model), _device(model)
    ids, positions = (torch.as_tensor(x, device=device).long()[None] for x in (packed.tokens, packed.positions))
    row, token = (torch.as_tensor(x, device=device).long() for x in (packed.decisions.row, packed.decisions.token))

    def logprobs() -> Tensor:
        with planned_attention(model):
            states = backbone(model)(
                input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, memopd_scheme=plan
            ).last_hidden_state[0]
        return _at(model, states[row], token)

    return Ready(len(packed), NAME, logprobs)


# ---- TRL: TreeRow, its gathered paths, and its head --------------------------------------------------------------


def trl(model: Any, episodes: Sequence[Episode]) -> Ready:
    """TRL as it is: its trie, its attention over gathered paths, its fused head."""
    return _tree(model, episodes, own_head=True)


def trl_our_head(model: Any, episodes: Sequence[Episode]) -> Ready:
    """TRL's trie and attention, and our vocabulary pass: what the layout alone costs."""
    return _tree(model, episodes, own_head=False)


def _tree(model: Any, episodes: Sequence[Episode], own_head: bool) -> Ready:
    packing = _trl()
    row = packing.TreeRow()
    for episode in episodes:
        for call in episode.calls:
            ids = torch.as_tensor(np.concatenate([call.prompt, call.completion]))
            mask = torch.zeros(len(ids), dtype=torch.long)
            mask[len(call.prompt) :] = 1
            row.add({
                "input_ids": ids, "completion_mask": mask, "old_log_probs": torch.zeros(len(ids)),
                "advantage": 1.0, "group_id": episode.task_id,
            })  # fmt: skip
    made = {name: value.to(_device(model)) for name, value in row.pack().items()}
    longest_q, longest_k = made["tree_max_seqlens"].tolist()
    token = made["shift_labels"][made["token_index"]]
    tree = {name: made[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    tree |= {"tree_max_seqlen_q": longest_q, "tree_max_seqlen_k": longest_k}
    rows = {"input_ids": made["input_ids"][None], "position_ids": made["position_ids"][None], **tree}

    def logprobs() -> Tensor:
        if own_head:
            out = model(shift_labels=made["shift_labels"][None], fused_lm_head=True, **rows)
            scores: Tensor = out.log_probs.flatten()[made["token_index"]]
            return scores
        states = backbone(model)(use_cache=False, **rows).last_hidden_state[0]
        return _at(model, states[made["token_index"]], token)

    if own_head and not hasattr(model, "_benchmarks_trl_head"):
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model, outputs=("log_probs", "entropy"))  # what its trainer asks for
        model._benchmarks_trl_head = True
    return Ready(len(made["input_ids"]), packing.TREE_ATTENTION, logprobs)


def _trl() -> Any:
    """TRL's module, with our operator in place of the hub's kernel."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    try:
        from trl.experimental.async_grpo import packing
    except ImportError:  # of what its trainer needs beside it, such as datasets; the file itself needs none of that
        packing = _module("trl", "experimental/async_grpo/packing.py")
    packing._flash_attn = lambda: KERNEL
    packing.register_tree_attention()
    return packing


@lru_cache(maxsize=1)
def _module(package: str, file: str) -> Any:
    """A file of an installed package, without the package around it."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations
    spec = importlib.util.spec_from_file_location("benchmarks_packing", f"{found.submodule_search_locations[0]}/{file}")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
    softmax_scale: float, causal: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """The signature that TRL calls, of flash-attn."""
    assert causal
    assert window_size == (-1, -1)
    return varlen(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale)[0]


KERNEL = SimpleNamespace(flash_attn_varlen_func=_flash_attn_varlen_func)


# ---- PrefixGrouper: one shared prefix per group, padded rows -----------------------------------------------------

_GROUPED, _UNPADDED = "prefix_grouper_attention", "benchmarks_unpadded"


@dataclass(frozen=True, slots=True)
class Unpadded:
    """The valid entries of a padded batch, by their places in it, as segments."""

    query: Tensor  # [T] places of the valid queries in [batch · longest]
    key: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor) -> Unpadded:
        """From two padding masks, [batch, longest]."""
        n_q, n_k = query.sum(1), key.sum(1)
        zero = n_q.new_zeros(1)
        cu_q, cu_k = (torch.cat([zero, n.cumsum(0)]).int() for n in (n_q, n_k))
        at_q, at_k = (mask.flatten().nonzero()[:, 0] for mask in (query, key))
        return cls(at_q, at_k, cu_q, cu_k, int(n_q.max()), int(n_k.max()))


def unpadded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, unpadded: tuple[Unpadded, Unpadded] | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers' flash attention does with a padding mask, which is found once here and not in every layer."""
    assert unpadded is not None
    where = unpadded[0] if query.shape[2] == key.shape[2] else unpadded[1]
    q, k, v = (
        x.transpose(1, 2).flatten(0, 1).index_select(0, places)
        for x, places in ((query, where.query), (key, where.key), (value, where.key))
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out, _lse = varlen(q, k, v, where.cu_q, where.cu_k, where.max_q, where.max_k, scale)
    batch, heads, length, width = query.shape
    padded = out.new_zeros(batch * length, heads, width).index_copy(0, where.query, out)
    return padded.view(batch, length, heads, width), None


def prefix_grouper(model: Any, episodes: Sequence[Episode]) -> Ready:
    """A group is a task: its prefix is what the prompts of all its calls have in common."""
    from prefix_grouper import PrefixGrouper
    from prefix_grouper.utils.register_transformers import _prefix_grouper_attention_forward

    # Not compiled: it repeats keys by counts that it reads from the device, so every line of it would break the graph.
    AttentionInterface.register(_GROUPED, torch.compiler.disable(_prefix_grouper_attention_forward))
    AttentionInterface.register(_UNPADDED, unpadded_attention)
    device = _device(model)
    groups, order = _groups(episodes)
    shared = [_common(calls) for calls in groups]
    if min(shared) < 1:
        raise ValueError("PrefixGrouper needs a common prefix, and the calls of a task have none")
    prefixes = [calls[0].prompt[:n] for calls, n in zip(groups, shared, strict=True)]
    suffixes = [
        np.concatenate([c.prompt, c.completion])[n:] for calls, n in zip(groups, shared, strict=True) for c in calls
    ]
    (prefix, prefix_mask), (suffix, suffix_mask) = (_padded(rows, device) for rows in (prefixes, suffixes))
    grouper = PrefixGrouper.from_ungrouped_masks(prefix_mask, suffix_mask, [len(g) for g in groups], device)
    ids = grouper.concat_input(prefix, prefix_mask, suffix, suffix_mask)
    unpadded = (
        Unpadded.of(grouper.prefix_attn_mask, grouper.prefix_attn_mask),
        Unpadded.of(grouper.ungrouped_suffix_mask, grouper.suffix_attn_mask),
    )
    positions = _positions(grouper, device)
    # The row before a suffix's first token is the last of its prefix: `split_output` puts it there.
    start = np.array([len(c.prompt) - n for calls, n in zip(groups, shared, strict=True) for c in calls])
    length = np.array([len(c.completion) for calls in groups for c in calls])
    at = {call: (line, int(start[line]), int(length[line])) for line, call in enumerate(order)}
    spans = [at[call] for call in range(len(order))]
    line = torch.as_tensor(np.concatenate([np.full(n, i) for i, _, n in spans]), device=device)
    place = torch.as_tensor(np.concatenate([np.arange(a, a + n) for _, a, n in spans]), device=device)
    token = torch.as_tensor(np.concatenate([c.completion for c in calls_of(episodes)]), device=device).long()

    def logprobs() -> Tensor:
        states = backbone(model)(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False,
            prefix_grouper=grouper, prefix_grouper_attn_func=_UNPADDED, unpadded=unpadded,
        ).last_hidden_state  # fmt: skip
        _, _, after, _ = grouper.split_output(states, include_prefix_last=1)
        return _at(model, after[line, place], token)

    return Ready(ids.numel(), _GROUPED, logprobs)


def _groups(episodes: Sequence[Episode]) -> tuple[list[list[Call]], list[int]]:
    """The calls of every task, and the number of each call in the order of the episodes."""
    groups: dict[str, list[tuple[int, Call]]] = {}
    number = 0
    for episode in episodes:
        for call in episode.calls:
            groups.setdefault(episode.task_id, []).append((number, call))
            number += 1
    return [[c for _, c in g] for g in groups.values()], [i for g in groups.values() for i, _ in g]


def _common(calls: Sequence[Call]) -> int:
    """The length of the longest prefix of all prompts."""
    length = min(len(c.prompt) for c in calls)
    for call in calls[1:]:
        differ = np.flatnonzero(call.prompt[:length] != calls[0].prompt[:length])
        length = int(differ[0]) if len(differ) else length
    return length


def _padded(rows: Sequence[np.ndarray[Any, Any]], device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = True
    return ids.to(device), mask.to(device)


def _positions(grouper: Any, device: torch.device) -> Tensor:
    """Every suffix goes on where its prefix ends."""
    positions = np.zeros(grouper.padding_mask.shape, np.int64)
    for i, info in enumerate(grouper.group_info):
        n = info.prefix_len
        parts = [np.arange(n), *(np.arange(n, n + m) for m in info.suffix_lens)]
        positions[i, : sum(map(len, parts))] = np.concatenate(parts)
    return torch.as_tensor(positions, device=device)


# ---- all arms ----------------------------------------------------------------------------------------------------

OURS = "MemOPD"
ARMS: dict[str, tuple[Build, str | None]] = {  # and the module that an arm needs
    "split rows": (split, None),
    "merged rows": (merged, None),
    "PrefixGrouper": (prefix_grouper, "prefix_grouper"),
    "TRL TreeRow": (trl, "trl"),
    "TRL TreeRow, our head": (trl_our_head, "trl"),
    OURS: (memopd, None),
}


def missing(name: str) -> str:
    """Why an arm cannot run here, or nothing."""
    module = ARMS[name][1]
    return f"{module} is not installed" if module and importlib.util.find_spec(module) is None else ""


def _at(model: Any, states: Tensor, token: Tensor) -> Tensor:
    return vocabulary_scores(head_of(model, check=False), states, token).logprob


def _device(model: Any) -> torch.device:
    device: torch.device = next(model.parameters()).device
    return device
