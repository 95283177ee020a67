"""The tensors of a call as NumPy arrays, and the way back to the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(kw_only=True)
class Arrays:
    """Arrays by argument name; those of CPU tensors share the tensors' memory."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: list[tuple[torch.Tensor, np.ndarray]] = field(default_factory=list)

    def get(self, name: str) -> np.ndarray | None:
        return self.arrays.get(name)

    def add_input(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self.arrays[name] = tensor.detach().cpu().numpy()

    def add_output(self, name: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            array = tensor.detach().cpu().numpy()
            self.arrays[name] = array
            self.outputs.append((tensor, array))

    def write_back(self) -> None:
        for tensor, array in self.outputs:
            if tensor.device.type != "cpu":
                tensor.copy_(torch.from_numpy(array))
