"""What must hold after any call, whatever was done to its arguments. README.md beside this file lists the rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fuzz.calls import Call
from fuzz.memory import TIGHT, Arena, bytes_of, leaves

REFUSALS = (TypeError, ValueError)
# A result that was asked for and that no memory holds.
NO_MEMORY = (MemoryError, torch.OutOfMemoryError)
# Python's own words about a signature.
_SIGNATURE = re.compile(
    r"unexpected keyword argument|missing \d+ required|positional arguments? but|multiple values for"
)

# torch hands no such tensor to anybody (without memory, sparse, quantized), and a machine without a GPU has no device 0.
# tvm-ffi 0.1.11 takes no int of more than 64 bits.
_TORCH_REFUSES = re.compile(
    r"Cannot pack tensors on|Tensor that doesn't have storage|not supported by dlpack"
    r"|Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|accelerator device when none|CUDA out of memory"
    r"|Python int too large"
)
# What the reference does not look at: alignment, strides of the compress plans' arguments, what stands for a number, a
# flag or a list of numbers.
_STRICTER = re.compile(
    r"expected (data aligned to|a contiguous tensor|strides)|got another type|expected a bool|a tuple or a list of ints"
    r"|Python int too large"
)

Guarded = Callable[[Arena], AbstractContextManager[Any]]
"""Forbids what lies in the arena's storages but in no tensor, while it is open."""


class Finding(Exception):
    """Something that must not be."""


class Unbuildable(Exception):
    """torch itself cannot make such an argument."""


class Outcome:
    """A call's result, or what it raised, and the memory it ran on."""

    def __init__(
        self, call: Call, run: Callable[[dict[str, Any]], Any], device: str, guarded: Guarded | None = None
    ) -> None:
        self.call = call
        self.arena = Arena(device)
        self.result: Any = None
        self.error: BaseException | None = None
        self.graph: Any = None
        try:
            arguments = self.arena.build(call.arguments)
        except Exception as error:
            raise Unbuildable(str(error)) from error
        with guarded(self.arena) if guarded else nullcontext():
            try:
                self.result = run(arguments)
                if device != "cpu":
                    torch.cuda.synchronize()
            except Exception as error:
                self.error = error

    def refused(self) -> bool:
        return isinstance(self.error, REFUSALS)

    def error_text(self) -> str:
        first, *_ = str(self.error).splitlines() or [""]  # torch adds a stack trace
        return f"{type(self.error).__name__}: {first}"


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise Finding(message)


def check_error(outcome: Outcome, names: set[str]) -> None:
    """A refusal is a TypeError or a ValueError that names an argument."""
    if outcome.error is None:
        return
    if isinstance(outcome.error, NO_MEMORY) or _TORCH_REFUSES.search(str(outcome.error)):
        return
    if not outcome.refused():
        raise Finding(f"raised {outcome.error_text()}")
    text = str(outcome.error)
    words = set(re.findall(r"\w+", text))
    _expect(bool(words & names or _SIGNATURE.search(text)), f"no argument is named by {outcome.error_text()}")


def check_memory(outcome: Outcome) -> None:
    """A refusal changes nothing; else only outputs change, and nothing beside, between or around tensors."""
    for leaf, offset in outcome.arena.changed(outputs_too=outcome.error is not None):
        what = "raised, but changed" if outcome.error is not None else "changed memory that is no output: of"
        raise Finding(f"{what} {leaf!r} at byte {offset} of its tensor")


def check_same(one: Outcome, two: Outcome, what: str) -> None:
    """Both returned the same, and left the same bytes everywhere."""
    mine, its = (list(leaves(outcome.result, torch.Tensor)) for outcome in (one, two))
    _expect(len(mine) == len(its), f"{len(mine)} results, {what} {len(its)}")
    for number, (a, b) in enumerate(zip(mine, its, strict=True)):
        kinds = [f"{t.dtype} {list(t.shape)}" for t in (a, b)]
        _expect(kinds[0] == kinds[1], f"result {number} is {kinds[0]}, {what}: {kinds[1]}")
        _expect(torch.equal(bytes_of(a), bytes_of(b)), f"result {number} differs from {what}:\n{a.cpu()}\n{b.cpu()}")
    for leaf in one.arena.kept:
        if leaf.pointers is None and not (one.call.racy and leaf.pool):
            differs = one.arena.now(leaf) != two.arena.now(leaf)
            if differs.any():
                where = f"{int(differs.sum())} from {int(differs.nonzero()[0])} on"
                raise Finding(f"{what} leaves other bytes in {leaf!r}, {where}")


def graphed(call: Call) -> Outcome:
    """The call captured into a CUDA graph, which is then replayed once."""

    graph = torch.cuda.CUDAGraph()  # lives as long as results that lie in its memory

    def capture_and_replay(arguments: dict[str, Any]) -> Any:
        with torch.cuda.graph(graph):
            result = call(arguments)
        graph.replay()
        return result

    outcome = Outcome(call, capture_and_replay, "cuda")
    outcome.graph = graph
    return outcome


def judge(call: Call, device: str, *, graph: bool = False, guarded: Guarded | None = None) -> str:
    """Runs the call by all rules; `graph`: on a GPU as a graph, too. Returns "refused" or "returned"; raises Finding, and Unbuildable."""
    first = Outcome(call, call, device, guarded)
    check_error(first, call.names)
    check_memory(first)
    if call.reference is not None and not call.aliased and (device == "cpu" or not call.racy):
        _check_reference(first)
    if first.error is not None:
        return "refused"
    if device == "cpu":
        again = Outcome(call, call, device)
        check_same(first, again, "the same call once more")
    elif graph and call.capturable and not call.arguments.get("check") and not TIGHT:
        replayed = graphed(call)
        check_error(replayed, call.names)
        check_memory(replayed)
        if not call.racy:
            check_same(first, replayed, "the replay of its graph")
    return "returned"


def _check_reference(first: Outcome) -> None:
    call = first.call
    reference = Outcome(call, lambda arguments: call.invoke(call.reference, arguments), first.arena.device.type)
    if first.error is None:
        _expect(reference.error is None, f"returned, but the reference raised {reference.error_text()}")
        check_same(first, reference, "the reference")
    elif not _STRICTER.search(str(first.error)):
        _expect(reference.error is not None, f"raised {first.error_text()}, but the reference accepts it")
