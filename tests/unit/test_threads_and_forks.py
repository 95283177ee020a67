"""Every operator from many threads at once, and in children that are forked after, before and during its use."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from operator_calls import CALLS, LongCalls
from threads import run_in_threads

import hotplan
from hotplan import hisparse

THREADS = 16


def test_no_operator_is_missing() -> None:
    public = [*(getattr(hotplan, name) for name in hotplan.__all__), *(getattr(hisparse, n) for n in hisparse.__all__)]
    assert {value.__name__ for value in public if inspect.isfunction(value)} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_threads_with_tensors_of_their_own_do_not_know_of_each_other(name: str) -> None:
    expected = [CALLS[name](seed) for seed in range(THREADS)]
    assert len(set(expected)) == THREADS
    barrier = threading.Barrier(THREADS)

    def work(i: int) -> None:
        barrier.wait()
        for _ in range(3):
            assert CALLS[name](i) == expected[i]

    run_in_threads(THREADS, work)


@pytest.mark.parametrize("family", ["compress", "hisparse", "linear", "dsv4", "blocks", "steps"])
def test_calls_that_overlap(family: str) -> None:
    """Each of them takes long enough that several run at the same time, on as many cores."""
    alone = [LongCalls(family, seed) for seed in range(4)]
    for calls in alone:
        calls.run(40)
    together = [LongCalls(family, seed) for seed in range(4)]
    barrier = threading.Barrier(4)

    def work(i: int) -> None:
        barrier.wait()
        together[i].run(40)

    run_in_threads(4, work)
    assert [calls.digest() for calls in together] == [calls.digest() for calls in alone]


def test_all_operators_at_once() -> None:
    names = list(CALLS)
    expected = {name: CALLS[name](5) for name in names}

    def work(i: int) -> None:
        for name in names[i:] + names[:i]:
            assert CALLS[name](5) == expected[name]

    run_in_threads(len(names), work)


_FIRST_CALLS = """
import sys
sys.path[:0] = sys.argv[1:]
import threading
from operator_calls import CALLS, LongCalls
from threads import run_in_threads
from hotplan.jit import loader
names = list(CALLS)
barrier = threading.Barrier(16)
found = {}
def work(i):
    barrier.wait()
    found[i] = CALLS[names[i * 3 % len(names)]](i)
assert not loader._modules
run_in_threads(16, work)
for i in range(16):
    assert CALLS[names[i * 3 % len(names)]](i) == found[i]
print(len(loader._modules), "modules")
"""


def test_the_first_calls_of_a_process_race() -> None:
    """Sixteen threads, none of which finds a module loaded."""
    paths = [str(Path(__file__).parent), str(Path(hotplan.__file__).parents[1])]
    done = subprocess.run([sys.executable, "-c", _FIRST_CALLS, *paths], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3 modules\n"), done.stderr


# -- children ----------------------------------------------------------------------------------------------------------


def _in_child(expected: dict[str, str]) -> None:
    torch.set_num_threads(1)  # the threads of torch itself are not there in a child
    for name, digest in expected.items():
        assert CALLS[name](7) == digest, name


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_calls_operators(busy: bool) -> None:
    """busy: while threads of the parent are inside operators, so that the child is a copy of that moment."""
    expected = {name: call(7) for name, call in CALLS.items()}
    stop = threading.Event()

    def work(i: int) -> None:
        names = list(CALLS)
        while not stop.is_set():
            CALLS[names[i]](i)
            i = (i + 1) % len(names)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4 * busy)]
    for thread in threads:
        thread.start()
    try:
        context = multiprocessing.get_context("fork")
        for _ in range(3 if busy else 1):
            child = context.Process(target=_in_child, args=(expected,), daemon=True)
            child.start()
            child.join(60)
            hangs = child.is_alive()
            child.kill()
            assert not hangs
            assert child.exitcode == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_state_of_the_parent_is_the_childs_own() -> None:
    """What a child resolves, its parent does not see."""
    pool = torch.arange(100 * 16, dtype=torch.uint8).view(100, 16)
    buffer = hotplan.HotBuffer(pool, max_requests=2, top_k=8, hot_slots=16, device="cpu")
    request = buffer.admit()
    buffer.resolve(torch.arange(8, dtype=torch.int32).view(1, 8), [request])
    before = buffer.device_global_indices.clone()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            buffer.resolve(torch.arange(50, 58, dtype=torch.int32).view(1, 8), [request])
            changed = not torch.equal(buffer.device_global_indices, before)
            status = 0 if changed and tuple(buffer.stats()) == (0, 16) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(buffer.device_global_indices, before)
    assert tuple(buffer.stats()) == (0, 8)
