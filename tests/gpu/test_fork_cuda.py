"""Forked children on a machine with a GPU: CUDA is theirs as long as the parent has only used CPU operators, and counts
GPUs with PYTORCH_NVML_BASED_CUDA_CHECK=1 (docs/troubleshooting.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hotplan

pytestmark = pytest.mark.gpu

_PROGRAM = """
import os, sys, traceback
sys.path[:0] = sys.argv[2:]
import torch, hotplan
from hotplan import hisparse, jit

def plan(device):
    rid, seq = torch.arange(4, device=device), torch.tensor([128, 5, 256, 127], device=device)
    return hotplan.plan_compress_decode_legacy(rid, seq, compress_ratio=4).cpu()

def translate(device):
    mapping = torch.arange(10, device=device).flip(0)
    return hisparse.translate_padded_hisparse_locations(mapping, torch.tensor([3, -1, 9], device=device)).cpu()

def child(work):
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

def same_on_the_gpu():
    assert torch.equal(plan("cuda"), expected[0])
    assert torch.equal(translate("cuda"), expected[1])

def cpu_alone():
    assert torch.equal(plan("cpu"), expected[0])
    assert torch.equal(translate("cpu"), expected[1])
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        assert "forked subprocess" in str(error)  # torch's own
    else:
        raise AssertionError("CUDA works in a child of a process that uses it")

expected = plan("cpu"), translate("cpu")
hotplan.HotBuffer(torch.zeros((8, 16), dtype=torch.uint8), max_requests=1, top_k=2, hot_slots=4, device="cpu")
assert not torch.cuda.is_initialized()
if sys.argv[1] == "before":
    child(same_on_the_gpu)
else:
    same_on_the_gpu()
    child(cpu_alone)
"""


@pytest.mark.parametrize("forked", ["before", "after"])
def test_children_before_and_after_the_parent_uses_cuda(forked: str) -> None:
    """before: what CPU operators load leaves CUDA alone, down to the driver, or the child could not use it."""
    command = [sys.executable, "-c", _PROGRAM, forked, str(Path(hotplan.__file__).parents[1])]
    # tvm-ffi asks torch for GPUs when it is imported, which uses the driver unless torch is told to ask NVML.
    env = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
