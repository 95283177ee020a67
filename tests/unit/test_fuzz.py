"""The fuzzer itself: a short run of it, all operators in its registry, and planted faults that it must find."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import hotplan
from hotplan import hisparse

ROOT = Path(__file__).resolve().parents[2]
NAMES_OF_DATA = {"HiSparseSpecState", "SwapPlan"}


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/fuzz/run.py"), *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_every_public_operator_is_fuzzed() -> None:
    operators = {name for name in hotplan.__all__ if name.startswith("plan_")}
    operators |= {*hisparse.__all__} - NAMES_OF_DATA | {"HotBuffer"}
    assert set(fuzz("--list").stdout.split()) == operators


def test_a_short_run_finds_nothing() -> None:
    done = fuzz("--cases", "350", "--seed", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}
    # Neither all valid nor all refused at the first look.
    assert counts["returned"] > 100
    assert counts["refused"] > 100
    assert counts["findings"] == 0


# Each fault belongs to one operator, and does its harm in a way that the call itself does not show.
FAULTS = {
    "writes behind an output": (
        """
        def faulty(*args, **kwargs):
            original(*args, **kwargs)
            table = kwargs["device_global_indices"]
            table.as_strided((table.numel() + 1,), (1,), table.storage_offset())[-1] = 7
        """,
        "changed memory that is no output",
    ),
    "writes into an input": (
        """
        def faulty(*args, **kwargs):
            original(*args, **kwargs)
            kwargs["request_state_indices"][-1] += 1
        """,
        "changed memory that is no output",
    ),
    "writes before it refuses": (
        """
        def faulty(*args, **kwargs):
            kwargs["device_global_indices"][..., :1] = 7
            raise ValueError("written_slots: expected something else")
        """,
        "raised, but changed",
    ),
    "raises what nobody expects": (
        """
        def faulty(*args, **kwargs):
            raise RuntimeError("internal")
        """,
        "raised RuntimeError: internal",
    ),
    "names no argument": (
        """
        def faulty(*args, **kwargs):
            raise ValueError("wrong")
        """,
        "no argument is named by ValueError: wrong",
    ),
    "does nothing": (
        """
        def faulty(*args, **kwargs):
            return None
        """,
        "the reference leaves other bytes",
    ),
    "ends the process": (
        """
        def faulty(*args, **kwargs):
            import ctypes
            ctypes.string_at(0)
        """,
        "ended the process: SIGSEGV",
    ),
}
PLANT = """
import inspect, textwrap
from fuzz import residency_calls
from hotplan import hisparse

original = hisparse.invalidate_written_slots
namespace = {{"original": original}}
exec(textwrap.dedent({fault!r}), namespace)

def invalidate_written_slots(device_global_indices, request_state_indices, req_id_per_token, written_slots):
    return namespace["faulty"](
        device_global_indices=device_global_indices, request_state_indices=request_state_indices,
        req_id_per_token=req_id_per_token, written_slots=written_slots,
    )

hisparse.invalidate_written_slots = invalidate_written_slots
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found_and_reproduced(fault: str, tmp_path: Path) -> None:
    source, message = FAULTS[fault]
    plant = tmp_path / "plant.py"
    plant.write_text(PLANT.format(fault=source))
    planted = ("--only", "invalidate_written_slots", "--prepare", str(plant))
    found = fuzz("--cases", "40", "--seed", "0", *planted)
    assert found.returncode == 1, found.stdout + found.stderr
    pattern = rf"FINDING \d+: invalidate_written_slots {message}.*?reproduce: python tests/fuzz/run.py ([^\n]*)"
    match = re.search(pattern, found.stdout, re.DOTALL)
    assert match, found.stdout
    if fault in ("writes behind an output", "ends the process"):
        again = fuzz(*shlex.split(match[1]))
        assert again.returncode == 1
        assert message in again.stdout
