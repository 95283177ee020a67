"""Which device a replay runs on, and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotplan import jit


def choose_device(wanted: str, families: Sequence[str] = ("compress",)) -> tuple[str, str]:
    """The device for "auto", "cpu", "cuda" or "cuda:N", and a sentence that says why.

    "auto" takes the first GPU if there is one and the CUDA modules of all `families` of operators load or compile; what
    is asked for by name is never replaced. Raises ValueError for a device that torch does not see, and whatever
    `hotplan.jit.load` raises.
    """

    def load(backend: str) -> None:
        for family in families:
            jit.load(family, backend)

    if wanted == "cpu":
        load("cpu")
        return "cpu", "asked for"
    if wanted != "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = torch.device(wanted).index or 0
        if index >= count:
            raise ValueError(f"device: expected one of {count} CUDA devices that torch sees, got {wanted}")
        load("cuda")
        return f"cuda:{index}", f"asked for, {torch.cuda.get_device_name(index)}"
    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
    elif not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    else:
        try:
            torch.zeros(1, device="cuda:0")
            load("cuda")
            return "cuda:0", f"torch sees {torch.cuda.get_device_name(0)}"
        except Exception as error:  # whatever is wrong with the GPU or its compiler, the CPU can do the work
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"the GPU cannot be used: {lines[0]}"
    load("cpu")
    return "cpu", reason
