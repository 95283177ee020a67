"""The operators in plain PyTorch and numpy: slow, obvious, and byte for byte what the kernels give.

Use them to check a kernel, to read what a plan means, or where nothing can be compiled. They take the same
arguments as the public functions and work on tensors of any device: what they need is moved to the CPU, which
waits for the GPU.

Compress plans are here; the two families of HiSparse are in :mod:`hotplan.reference.hisparse` (vLLM's addressing) and
:mod:`hotplan.reference.device_buffer` (SGLang's).
"""

from __future__ import annotations

from hotplan.reference.compress import (
    plan_compress_decode,
    plan_compress_decode_legacy,
    plan_compress_prefill,
    plan_compress_prefill_legacy,
    plan_online_decode,
    plan_online_prefill,
    plan_online_verify,
    plan_step_decode,
    plan_step_prefill,
)

__all__ = [
    "plan_compress_decode",
    "plan_compress_decode_legacy",
    "plan_compress_prefill",
    "plan_compress_prefill_legacy",
    "plan_online_decode",
    "plan_online_prefill",
    "plan_online_verify",
    "plan_step_decode",
    "plan_step_prefill",
]
