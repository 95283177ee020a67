"""First use: compiling each module from nothing, loading a built one in a fresh process, importing the package.

    python benchmark/bench_jit.py --archs 9.0a --out benchmark/results/jit.jsonl

needs no GPU (then name --archs for the CUDA modules). Beside it, where SGLang is found, its c_plan module compiled
from its own headers with its own flags, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import hotplan.jit
import peers
import report
from hotplan.jit.key import source_root
from hotplan.jit.toolchain import ARCHS_VAR, Memo, MissingTool, find_cuda, find_cxx, target_archs
from timing import Stats

COMPILE_GOAL_S = 3.0
LOAD_GOAL_MS = 20.0

# A fresh process, as a server is when the first operator is called: torch is imported, the GPU is in use.
_LOAD = """
import json, sys, time
import torch, tvm_ffi, hotplan.jit
if torch.cuda.is_available():
    torch.empty(1, device="cuda")
family, backend = sys.argv[1:]
start = time.perf_counter()
module = hotplan.jit.load(family, backend)
first = time.perf_counter() - start
start = time.perf_counter()
for _ in range(10_000):
    hotplan.jit.load(family, backend)
again = (time.perf_counter() - start) / 10_000
assert isinstance(module, tvm_ffi.Module)
print(json.dumps({"first": first * 1e3, "again": again * 1e6}))
"""

_IMPORT = """
import json, time
start = time.perf_counter()
import torch
after_torch = time.perf_counter()
import tvm_ffi
after_tvm_ffi = time.perf_counter()
import hotplan
hotplan.plan_compress_prefill  # names are looked up when they are used
end = time.perf_counter()
print(json.dumps({"torch": (after_torch - start) * 1e3, "tvm_ffi": (after_tvm_ffi - after_torch) * 1e3,
                  "hotplan": (end - after_tvm_ffi) * 1e3}))
"""


def fresh_process(code: str, *arguments: str, **environment: str) -> dict[str, float]:
    """What `code` prints as JSON in a new Python process that imports this very hotplan."""
    path = os.pathsep.join([str(Path(hotplan.jit.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def cold(build: Callable[[Path], object], repeats: int) -> dict[str, float | int]:
    """Seconds of `build` into a new directory each time."""
    seconds = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            start = time.perf_counter()
            build(Path(directory, "cache"))
            seconds.append(time.perf_counter() - start)
    return Stats.of(seconds, 1).as_dict()


def build_peer(root: Path, archs: str, directory: Path) -> None:
    """SGLang compiles for one architecture, the device's."""
    peers.build_peer_compress(root, directory, arch=archs.split(",")[0], online=False)


def compile_rows(modules: list[tuple[str, str]], archs: str, sglang: Path | None, repeats: int) -> list[report.Row]:
    rows = []
    for family, backend in modules:
        targets = archs if backend == "cuda" else None
        more: dict[str, Any] = {"archs": targets}
        if sglang and (family, backend) == ("compress", "cuda"):
            more["peer_name"] = "SGLang c_plan"
            more["peer"] = cold(partial(build_peer, sglang, archs), repeats)
        ours = cold(partial(hotplan.jit.build, family, backend, targets), repeats)
        title = "Compile from nothing"
        rows.append(report.make_row(title, family, backend, "compile", ours, goal=COMPILE_GOAL_S, unit="s", **more))
    return rows


def load_rows(modules: list[tuple[str, str]], archs: str, repeats: int) -> list[report.Row]:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory, "cache")
        for family, backend in modules:
            hotplan.jit.build(family, backend, archs if backend == "cuda" else None, cache)
            settings = {"HOTPLAN_CACHE_DIR": str(cache), "HOTPLAN_STRICT": "1", ARCHS_VAR: archs}
            runs = [fresh_process(_LOAD, family, backend, **settings) for _ in range(repeats)]
            first, again = (Stats.of([run[name] for run in runs], 1).as_dict() for name in ("first", "again"))
            section = "Built module in a fresh process"
            rows += [
                report.make_row(section, family, backend, "first load", first, goal=LOAD_GOAL_MS, unit="ms"),
                report.make_row(section, family, backend, "load again", again),
            ]
    return rows


def import_rows(repeats: int) -> list[report.Row]:
    runs = [fresh_process(_IMPORT) for _ in range(repeats)]
    names = ("torch", "tvm_ffi", "hotplan")
    stats = {name: Stats.of([run[name] for run in runs], 1).as_dict() for name in names}
    return [report.make_row("Imports, in this order", n, "-", "import", stats[n], unit="ms") for n in names]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", help=f"default: ${ARCHS_VAR}, else the visible GPUs', else no CUDA modules")
    parser.add_argument("--families", help="some of csrc/*, separated by commas; default: all")
    parser.add_argument("--repeats", type=int, default=5, help="median of so many runs (5)")
    parser.add_argument("--out", type=Path, help="also write JSON lines to this file")
    parser.add_argument("--sglang", metavar="PATH", help=f"SGLang's tree; default ${peers.ENV_SGLANG}, then sys.path")
    parser.add_argument("--no-peer", action="store_true", help="measure hotplan alone")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    os.environ.pop("HOTPLAN_STRICT", None)
    archs = options.archs
    if archs is None:
        try:
            archs = ",".join(target_archs()[0])
        except RuntimeError as error:
            print(f"CPU modules alone: {error}", file=sys.stderr)
    compilers = {"c++": find_cxx().version(Memo(None)).splitlines()[0]}
    backends = ["cpu"]
    if archs:
        try:
            compilers["nvcc"] = find_cuda(Memo(None)).version(Memo(None)).splitlines()[-1]
            backends.append("cuda")
        except MissingTool as error:
            print(f"CPU modules alone: {error}", file=sys.stderr)
    families = options.families.split(",") if options.families else hotplan.jit.families()
    modules = [(family, backend) for family in families for backend in backends]
    sglang = None if options.no_peer or "cuda" not in backends else peers.sglang_root(options.sglang)

    rows = compile_rows(modules, archs or "", sglang, options.repeats)
    rows += load_rows(modules, archs or "", options.repeats)
    rows += import_rows(options.repeats)

    import torch

    meta = report.collect_meta(
        "bench_jit",
        device="cuda" if torch.cuda.is_available() else "cpu",
        peer=f"SGLang {peers.sglang_version(sglang)}" if sglang else None,
        compilers=compilers,
        source_bytes=sum(p.stat().st_size for d in ("csrc", "include") for p in (source_root() / d).rglob("*.*")),
    )
    return report.publish(rows, meta, options.out)


if __name__ == "__main__":
    raise SystemExit(main())
