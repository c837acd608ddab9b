"""Chooses the kernel of a pack: one of ours by name, one that suits device, precision and model, or your own class.

A kernel is a class with a method `attend` (see memopd.models.attention.Scheme). Its constructor may have any of the
parameters in `_OFFERED`. It is built for every pass over a pack, unless it has an attribute `keep` that is true: then
it stays with the pack, and all passes and models for which these parameters are the same share it. With an attribute
`traceable` that is true, torch.compile looks into it (memopd.models.compiled). Our own kernels are built in the same
way.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from memopd.attention.cascade import CascadePlan, nodes_of, paths_cost
from memopd.attention.dense import DensePlan
from memopd.attention.flex import FlexPlan, flex_cost
from memopd.compile import Packed
from memopd.models.attention import Scheme
from memopd.models.support import has_windows
from memopd.names import build, check_parameters, parameters, resolve

log = logging.getLogger("memopd")

KERNELS: dict[str, Any] = {"dense": DensePlan, "cascade": CascadePlan, "flex": FlexPlan}

_SETTING = "model.attention"
_OFFERED = ("packed", "device", "dtype", "config", "windowed")  # the parameters that a kernel may have


def check_attention(attention: str, setting: str = _SETTING) -> None:
    """Refuse a name that is not a kernel before any model is loaded. `setting` names its place in the configuration."""
    kernel = _kernel(attention, setting)
    if kernel is not None:
        check_parameters(setting, attention, kernel, _OFFERED)


def make_plan(packed: Packed, attention: str, model: Any) -> Scheme:
    """The plan of `packed` for the kernel called `attention`; "auto" chooses one and logs why."""
    parameter, config = next(model.parameters()), model.config.get_text_config()
    if attention == "auto":
        attention, why = choose_attention(config, parameter.device.type, parameter.dtype, packed)
        log_once(f"attention: auto takes the kernel {attention} ({why})")
    values = (packed, parameter.device, parameter.dtype, config, has_windows(config))
    kernel, offered = _kernel(attention), dict(zip(_OFFERED, values, strict=True))
    taken = [offered[name] for name in parameters(kernel) if name in offered and name != "packed"]
    # By identity: `dataclasses.replace` makes packs with other rows that still hold the plans of the first.
    needed = (packed.exit, packed.positions, config if "config" in parameters(kernel) else None)
    key = (kernel, *map(id, needed), *(value for value in taken if value is not config))
    if key in packed.plans.made:
        plan: Scheme = packed.plans.made[key][0]
        return plan
    with torch.inference_mode(False):  # a later pass over this pack may have a gradient
        plan = build(_SETTING, attention, kernel, offered)
    if isinstance(plan, CascadePlan):
        log.debug("cascade: %s (%s)", plan.layout, plan.why)
    if getattr(plan, "keep", False):
        packed.plans.made[key] = (plan, needed)  # holds `needed`, so that their ids stay theirs
    return plan


def _kernel(attention: str, setting: str = _SETTING) -> Any:
    """The class of a name; None for "auto"."""
    return resolve(setting, attention, {"auto": None, **KERNELS}, ("attend",))


CPU_CASCADE_FROM = 512  # rows; with fewer, one dense mask is faster on a CPU (`python -m benchmarks attention`)


def choose_attention(config: Any, device: str, dtype: torch.dtype, packed: Packed) -> tuple[str, str]:
    """(kernel, why) for this model, device, precision and pack."""
    rows = len(packed)
    softcap = bool(getattr(config, "attn_logit_softcapping", None))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "v_head_dim", None) and getattr(config, "qk_head_dim", None) != config.v_head_dim:
        return "dense", "values and keys differ in width"
    if device == "cpu":
        if softcap:
            return "dense", "soft caps on a CPU"
        if rows < CPU_CASCADE_FROM:
            return "dense", f"under {CPU_CASCADE_FROM} rows on a CPU"
        return "cascade", f"{CPU_CASCADE_FROM} rows or more on a CPU"
    if device != "cuda":
        return "dense", f"no other kernel on {device}"
    if dtype == torch.float64:
        return "dense", "float64 has no other kernel on a GPU"
    if softcap:
        return "flex", "soft caps"
    if dtype == torch.float32:
        return (
            ("flex", "sliding windows in float32")
            if has_windows(config)
            else ("cascade", "float32, memory-efficient kernel")
        )
    if head_dim % 8 or head_dim > 256:
        return "flex", f"a head dimension of {head_dim}"
    if paths_cost(nodes_of(packed.exit)) <= flex_cost(packed):
        return "cascade", "FlashAttention on trie paths"
    return "flex", "many short calls under a long prefix"


_logged: set[str] = set()


def log_once(line: str, level: int = logging.INFO) -> None:
    if line not in _logged:
        _logged.add(line)
        log.log(level, line)
