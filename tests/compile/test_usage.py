"""What ptxas says of the kernels, and that none of them spills."""

from __future__ import annotations

import pytest
from compile_support import Family
from test_families import FAMILIES, cuda_missing

from hotplan.jit import usage
from hotplan.jit.compile import CompileError
from hotplan.jit.key import make_recipe
from hotplan.jit.toolchain import Memo, MissingTool

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN7hotplan8compress13decode_kernelINS0_12InlineLengthsILj32EEEEEvPKi' for 'sm_90a'
ptxas info    : Function properties for _ZN7hotplan8compress13decode_kernelINS0_12InlineLengthsILj32EEEEEvPKi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : Compile time = 5.4 ms
ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelv
    56 bytes stack frame, 52 bytes spill stores, 144 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers, 56 bytes cumulative stack size, 528 bytes smem
"""


def test_reading_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_readable", lambda names: [name[:6] for name in names])
    kernel, decode = usage.parse(PTXAS, "fake", "9.0a")  # by name
    assert kernel == usage.KernelUsage("fake", "_Z6ker", "9.0a", 80, 528, 56, 52, 144)
    assert kernel.spills
    assert (decode.registers, decode.shared, decode.spills) == (30, 0, False)
    with pytest.raises(ValueError, match="cannot read what ptxas says about _Z6kernelv"):
        usage.parse(PTXAS.replace("Used 80", "Took 80"), "fake", "9.0a")
    assert usage.parse("", "fake", "9.0a") == []


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void hotplan::a::load<false, (hotplan::a::Span)0>(hotplan::a::P, int)", "a::load<false, (a::Span)0>"),
        ("hotplan::a::verify(hotplan::a::P)", "a::verify"),
        ("_Z6kernelv", "_Z6kernelv"),
    ],
)
def test_names(name: str, short: str) -> None:
    assert usage._short(name) == short


def test_without_nvcc(family: Family) -> None:
    with pytest.raises(MissingTool):
        usage.kernel_usage([make_recipe("fake", "cuda", None, ("9.0a",), family.root)])


@pytest.mark.skipif(cuda_missing(), reason="no CUDA toolkit")
def test_an_error_of_nvcc(family: Family) -> None:
    family.write("csrc/fake/launch.cu", "#error not today\n")
    with pytest.raises(CompileError, match="not today"):
        usage.kernel_usage([make_recipe("fake", "cuda", Memo(None), ("9.0a",), family.root)])


ARCHS = ("8.0", "8.9", "9.0a", "10.0a", "12.0a")
"""Those that `hotplan build` is meant for."""


@pytest.mark.skipif(cuda_missing(), reason="no CUDA toolkit")
def test_no_kernel_spills() -> None:
    memo = Memo(None)
    recipes = [make_recipe(family, "cuda", memo, ARCHS) for family in FAMILIES]
    kernels = usage.kernel_usage(recipes, jobs=2)
    assert {kernel.arch for kernel in kernels} == set(ARCHS)
    assert {kernel.family for kernel in kernels} == set(FAMILIES)
    assert len(kernels) >= 20 * len(ARCHS)
    assert [kernel for kernel in kernels if kernel.spills] == []
    assert all(0 < kernel.registers <= 255 for kernel in kernels)
    assert all(kernel.shared <= 48 << 10 for kernel in kernels)  # more would need an attribute at launch
