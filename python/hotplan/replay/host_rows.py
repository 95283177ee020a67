"""The host pool behind the hot buffers: one row per token slot and layer, whose bytes say what they are."""

from __future__ import annotations

import numpy as np
import torch

# Odd, so that words of one row, rows of one slot, and slots of one generation all differ.
_SLOT, _GENERATION, _LAYER, _WORD = 0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x2545F4914F6CDD1D, 0x1B873593CC9E2D51


class HostRows:
    """Pinned host memory (plain where `device` is the CPU) for `rows` token slots in each of `layers` layers.

    Unwritten rows are zero. With `patterned`, every layer has memory of its own, and :meth:`write` fills rows with
    words made of slot, layer and how often that slot was written, so that a row from another slot, of another layer
    or from before the last write cannot pass for the right one. Without it rows stay zero, and all layers share them.

    Attributes:
        pools: uint8 [rows, row_bytes] per layer.
        generation: int64 [rows], on the CPU: how often each slot was written.
    """

    def __init__(self, rows: int, row_bytes: int, layers: int, device: torch.device, patterned: bool) -> None:
        def zeros() -> torch.Tensor:
            if device.type == "cuda":
                return torch.zeros((rows, row_bytes), dtype=torch.uint8, pin_memory=True)
            # NumPy's zeros take no memory before they are written, torch's do.
            return torch.from_numpy(np.zeros((rows, row_bytes), dtype=np.uint8))

        self.row_bytes = row_bytes
        self.patterned = patterned
        self.pools = [zeros() for _ in range(layers)] if patterned else [zeros()] * layers
        self.generation = torch.zeros(rows if patterned else 0, dtype=torch.int64)

    def write(self, slots: np.ndarray) -> None:
        """A server writes the KV of new tokens to `slots` (int64 [n], distinct), in every layer."""
        if not self.patterned or not len(slots):
            return
        index = torch.from_numpy(slots)
        self.generation[index] += 1
        for layer, pool in enumerate(self.pools):
            pool.view(torch.int64)[index] = self.expected(index, layer)

    def expected(
        self, slots: torch.Tensor, layer: int, device: torch.device | None = None, writes_ago: int = 0
    ) -> torch.Tensor:
        """int64 [n, row_bytes / 8] on `device` (None: the CPU): what the rows of `slots` (int64 [n], CPU) must hold, or
        held before their last `writes_ago` writes."""
        generation = self.generation[slots] - writes_ago
        base = slots * _SLOT + generation * _GENERATION + (layer + 1) * _LAYER  # wraps around, as int64 does in torch
        base = torch.where(generation > 0, base, 0)
        word = torch.where(generation > 0, _WORD, 0)
        steps = torch.arange(self.row_bytes // 8, device=device)
        return base.to(device)[:, None] + word.to(device)[:, None] * steps

    def explain(self, held: torch.Tensor, slot: int, layer: int) -> str:
        """What a wrong row (int64 [row_bytes / 8], CPU) is, in words."""
        one = torch.tensor([slot])
        for ago in range(1, int(self.generation[slot]) + 1):
            if torch.equal(held, self.expected(one, layer, writes_ago=ago)[0]):
                return f"the row from before the last {ago} writes" if ago > 1 else "the row from before the last write"
        return "another row" if held.any() else "zeros"
