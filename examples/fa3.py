"""FlashAttention 3 under our kernel, on a Hopper GPU that has it installed (the package flash_attn_interface).

PYTHONPATH=examples memopd train CONFIG --output RUN --model.attention fa3:Cascade
"""

from torch.nn.attention import activate_flash_attention_impl

from memopd.attention.cascade import CascadePlan as Cascade

__all__ = ["Cascade"]

activate_flash_attention_impl("FA3")
