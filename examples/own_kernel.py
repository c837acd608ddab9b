"""An attention kernel of your own: one class, named on the command line or in the configuration.

PYTHONPATH=examples memopd audit EPISODES --model MODEL --attention own_kernel:Mine
PYTHONPATH=examples memopd train CONFIG --output RUN --model.attention own_kernel:Mine
"""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Mine:
    def __init__(self, packed, device):
        """For a pack. Row q sees row k when k <= q < exit[k]."""
        row, exit = torch.arange(len(packed), device=device), torch.as_tensor(packed.exit, device=device)
        self.visible = (row <= row[:, None]) & (row[:, None] < exit)

    def attend(self, query, key, value, layer):
        """In every layer: queries [1, heads, rows, width] to outputs [1, rows, heads, width]."""
        if layer.window or layer.softcap or layer.sinks is not None:
            raise ValueError("own_kernel:Mine has no sliding windows, soft caps or sinks: use attention='flex'")
        out = scaled_dot_product_attention(query, key, value, self.visible, scale=layer.scale, enable_gqa=True)
        return out.transpose(1, 2)
