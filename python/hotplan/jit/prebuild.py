"""Building many modules ahead of time, side by side, for a cache or for a directory that is shipped."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from hotplan.jit import key
from hotplan.jit.loader import build


@dataclass(frozen=True)
class Module:
    """One module to build; `archs` is empty for the CPU."""

    family: str
    backend: str
    archs: tuple[str, ...]

    @property
    def label(self) -> str:
        return key.label_of(self.family, self.backend, self.archs)


@dataclass(frozen=True)
class Outcome:
    """What became of a module: where it is and the seconds its compile took (0.0: it was there), or an error."""

    module: Module
    path: str = ""
    seconds: float = 0.0
    error: str = ""


def modules(families: Sequence[str], archs: Sequence[str], cpu: bool) -> list[Module]:
    """CUDA modules, each for all of `archs`, come first: they take longest."""
    cuda = [Module(family, "cuda", tuple(archs)) for family in families] if archs else []
    return cuda + [Module(family, "cpu", ()) for family in families if cpu]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def build_all(wanted: Sequence[Module], out: Path, jobs: int, done: Callable[[Outcome], object]) -> list[Outcome]:
    """Builds each of `wanted` into `out`, up to `jobs` at a time, and calls `done` as each ends.

    An error of one does not stop the others. Builds need processes: what tvm-ffi wants to know of a build it reads from
    the environment. HOTPLAN_STRICT does not count, since whoever asks for a build wants one.
    """
    root = key.source_root()
    outcomes: dict[Module, Outcome] = {}
    workers = max(1, min(jobs, len(wanted)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures: dict[Future[Outcome], Module] = {pool.submit(_build, module, out, root): module for module in wanted}
        for future in as_completed(futures):
            module = futures[future]
            error = future.exception()  # of the process: it was killed, for instance
            outcome = future.result() if error is None else Outcome(module, error=str(error))
            outcomes[module] = outcome
            done(outcome)
    return [outcomes[module] for module in wanted]


def _build(module: Module, out: Path, root: Path) -> Outcome:
    os.environ["HOTPLAN_STRICT"] = "0"
    logging.getLogger("hotplan.jit").setLevel(logging.WARNING)  # the caller says what was built
    try:
        built = build(module.family, module.backend, module.archs or None, out, root=root)
    except (RuntimeError, ValueError, OSError) as error:
        return Outcome(module, error=str(error))
    return Outcome(module, str(built.path), built.seconds)
