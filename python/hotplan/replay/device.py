"""Which device a replay runs on, and why."""

from __future__ import annotations

import torch

from hotplan import jit


def choose_device(wanted: str) -> tuple[str, str]:
    """The device for "auto", "cpu", "cuda" or "cuda:N", and a sentence that says why.

    "auto" takes the first GPU if there is one and the CUDA module loads or compiles; what is asked for by name is
    never replaced. Raises ValueError for a device that torch does not see, and whatever `hotplan.jit.load` raises.
    """
    if wanted == "cpu":
        jit.load("compress", "cpu")
        return "cpu", "asked for"
    if wanted != "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = torch.device(wanted).index or 0
        if index >= count:
            raise ValueError(f"device: expected one of {count} CUDA devices that torch sees, got {wanted}")
        jit.load("compress", "cuda")
        return f"cuda:{index}", f"asked for, {torch.cuda.get_device_name(index)}"
    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
    elif not torch.cuda.is_available():
        reason = "torch sees no CUDA device"
    else:
        try:
            torch.zeros(1, device="cuda:0")
            jit.load("compress", "cuda")
            return "cuda:0", f"torch sees {torch.cuda.get_device_name(0)}"
        except Exception as error:  # whatever is wrong with the GPU or its compiler, the CPU can do the work
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"the GPU cannot be used: {lines[0]}"
    jit.load("compress", "cpu")
    return "cpu", reason
