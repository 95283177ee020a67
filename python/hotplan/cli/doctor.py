"""`hotplan doctor`: what is installed, what the JIT would do here, and what would go wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

_TVM_FFI_RANGE = ((0, 1, 11), (0, 2))  # as in pyproject.toml
_LOW_DISK_BYTES = 100 << 20
_DRIVER = Path("/proc/driver/nvidia/version")


class _Report:
    """What was found, in the form that --json prints, with the problems as they come up."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.problems: list[dict[str, str]] = []
        self.cannot_build: dict[str, str] = {}  # backend -> why, for what is only seen by trying
        self.cannot_run: dict[str, str] = {}

    def problem(self, text: str, remedy: str = "") -> None:
        """`remedy` may stay empty where the text says what to do."""
        self.problems.append({"problem": text, "remedy": remedy})


class _Reported(RuntimeError):
    """A reason that stands among the problems already."""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", text)[:3])


def _succeeds(command: list[str], text: str = "") -> str:
    """ "" if the command succeeds, else what it printed first."""
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return "" if done.returncode == 0 else next(iter(done.stdout.strip().splitlines()), "no message")


def _check_versions(report: _Report) -> None:
    from hotplan.version import __version__

    packages = {name: _version(name) for name in ("torch", "apache-tvm-ffi", "numpy", "ninja")}
    report.found["versions"] = {
        "hotplan": __version__,
        "python": platform.python_version(),
        **packages,
        "system": f"{platform.system()} {platform.machine()}",
    }
    tvm_ffi = packages["apache-tvm-ffi"]
    low, high = _TVM_FFI_RANGE
    if tvm_ffi is None or not low <= _numbers(tvm_ffi) < high:
        report.problem(
            f"apache-tvm-ffi is {tvm_ffi or 'not installed'}, hotplan is made for >=0.1.11,<0.2",
            "pip install 'apache-tvm-ffi>=0.1.11,<0.2'",
        )


def _check_gpus(report: _Report) -> list[tuple[int, int]]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
    report.found["gpus"] = [
        {"index": i, "name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory_bytes": gpu.total_memory}
        for i, gpu in enumerate(gpus)
    ]
    report.found["torch_cuda"] = torch.version.cuda
    if not gpus and torch.version.cuda is None and _DRIVER.exists():
        report.problem(
            "there is an NVIDIA driver, but torch is a build without CUDA",
            "install a CUDA build of torch (https://pytorch.org/get-started/locally)",
        )
    elif not gpus and torch.version.cuda is not None:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        report.problem(
            f"torch is built for CUDA {torch.version.cuda} but sees no GPU"
            + (f" (CUDA_VISIBLE_DEVICES={hidden!r})" if hidden is not None else "")
            + "; only the CPU backend runs here",
            "nothing, on a machine without a GPU; otherwise install or restart the NVIDIA driver (see nvidia-smi)",
        )
    return [(gpu.major, gpu.minor) for gpu in gpus]


def _check_tools(report: _Report, memo: Any, gpus: list[tuple[int, int]]) -> None:
    from hotplan.jit import toolchain

    tools: dict[str, Any] = {"c++": None, "ninja": None, "nvcc": None}
    report.found["tools"] = tools
    try:
        cxx = toolchain.find_cxx()
        tools["c++"] = {"path": cxx.path, "found_by": cxx.how, "version": cxx.version(memo).split("\n")[0]}
        said = _succeeds(
            [*shlex.split(cxx.command), "-std=c++20", "-fsyntax-only", "-x", "c++", "-"], "#include <concepts>\n"
        )
        if said:
            report.problem(f"{cxx.command} does not compile C++20: {said}", "install g++ 10 or newer, or set CXX")
            report.cannot_build |= dict.fromkeys(("cpu", "cuda"), "the C++ compiler does not work")
    except toolchain.MissingTool as error:
        report.problem(*_split_remedy(error))
    try:
        ninja = toolchain.find_ninja()
        tools["ninja"] = {"path": ninja}
    except toolchain.MissingTool:
        report.problem("no ninja", "pip install ninja")
    try:
        cuda = toolchain.find_cuda(memo)
        release = re.search(r"release ([\d.]+)", cuda.version(memo))
        tools["nvcc"] = {
            "path": cuda.nvcc,
            "version": release[1] if release else None,
            "cuda_home": cuda.home,
            "found_by": cuda.how,
        }
        # Preprocessing reads cuda_runtime.h, which refuses a host compiler that is too new.
        said = tools["c++"] and _succeeds([cuda.nvcc, "-std=c++20", "-E", "-x", "cu", "-o", os.devnull, os.devnull])
        if said:
            report.problem(f"{cuda.nvcc} does not work: {said}", "set CXX to a host compiler that this CUDA supports")
            report.cannot_build.setdefault("cuda", "nvcc does not work")
        if gpus and release:
            _check_driver(report, release[1])
    except toolchain.MissingTool as error:
        if gpus:
            report.problem(*_split_remedy(error))


def _split_remedy(error: Exception) -> tuple[str, str]:
    text, _, remedy = str(error).partition(". Install")
    return text, f"install{remedy}"


def _check_driver(report: _Report, toolkit: str) -> None:
    import torch

    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()  # 13000 for 13.0
    if driver and int(toolkit.split(".")[0]) > driver // 1000:
        known = f"{driver // 1000}.{driver % 1000 // 10}"
        report.problem(
            f"nvcc is of CUDA {toolkit}, the driver knows CUDA {known}: no kernel would start",
            "set CUDA_HOME to a toolkit that is not newer than the driver, or update the driver",
        )
        report.cannot_run["cuda"] = "the driver is older than the toolkit"


def _check_archs(report: _Report, gpus: list[tuple[int, int]]) -> None:
    from hotplan.jit.key import runs_on
    from hotplan.jit.toolchain import ARCHS_VAR, target_archs

    report.found["architectures"] = {"archs": [], "from": None}
    try:
        archs, source = target_archs()
    except ValueError as error:
        report.problem(str(error), f"correct it or unset it: {ARCHS_VAR} is only needed to build for other GPUs")
        return
    except RuntimeError:  # no GPU and no variable: nothing to build for
        return
    report.found["architectures"] = {"archs": list(archs), "from": source}
    for index, capability in enumerate(gpus):
        if not any(runs_on(arch, "{}.{}a".format(*capability)) for arch in archs):
            report.problem(
                f"GPU {index} has compute capability {capability[0]}.{capability[1]}, {source} says {' '.join(archs)}",
                f"add it to {ARCHS_VAR}, or unset the variable",
            )
            report.cannot_run["cuda"] = "it would not be compiled for a GPU that is here"


def _check_cache(report: _Report, directory: Path) -> None:
    from hotplan.jit import cache, loader

    there = directory
    while not there.exists():
        there = there.parent
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    entries = cache.entries(directory)
    report.found["cache"] = {
        "directory": str(directory),
        "exists": directory.is_dir(),
        "writable": writable,
        "strict": loader.strict(),
        "prebuilt": [str(path) for path in cache.prebuilt_dirs()],
        "entries": len(entries),
        "bytes": sum(entry.get("bytes", 0) for entry in entries),
    }
    if not writable and not loader.strict():
        report.problem(
            f"{there} cannot be written: every process compiles for itself again what the cache does not hold",
            "set HOTPLAN_CACHE_DIR to a directory that can be written",
        )
    elif shutil.disk_usage(there).free < _LOW_DISK_BYTES:
        report.problem(f"less than 100 MB are free in {there}", "free some, or set HOTPLAN_CACHE_DIR to another disk")


def _check_modules(report: _Report, directory: Path, memo: Any, gpus: list[tuple[int, int]]) -> bool:
    """What the first call of each module would do; True if all that should work here do."""
    from hotplan.jit import cache, key, loader, toolchain

    usable = True
    modules: dict[str, str] = {}
    report.found["modules"] = modules
    for family in key.families():
        for backend in key.UNITS:
            wanted = backend == "cpu" or bool(gpus)
            try:
                recipe = key.make_recipe(family, backend, memo)
                if backend in report.cannot_run:
                    raise _Reported(report.cannot_run[backend])
                if shipped := cache.find_shipped(recipe):
                    state = f"prebuilt: {shipped.parent}"
                elif cache.find(directory, recipe):
                    state = "built"
                elif loader.strict():
                    command = loader.build_command(recipe, directory)
                    raise RuntimeError(f"not built, and HOTPLAN_STRICT forbids it; to build: {command}")
                elif recipe.missing or backend in report.cannot_build:
                    raise _Reported(recipe.missing or report.cannot_build[backend])
                else:
                    toolchain.find_ninja()
                    state = "will be built on first use"
            except (RuntimeError, ValueError, OSError) as error:
                state = f"cannot be used: {error}" if wanted else "not needed without a GPU"
                usable = usable and not wanted
                if wanted and not isinstance(error, (_Reported, toolchain.MissingTool)):
                    report.problem(f"{family} ({backend}) {state}")
            modules[f"{family} {backend}"] = state
    return usable


def diagnose() -> dict[str, Any]:
    """Everything that `hotplan doctor` prints, as --json gives it. `ok` is what its exit status says."""
    from hotplan.jit import cache, toolchain

    report = _Report()
    _check_versions(report)
    gpus = _check_gpus(report)
    ok = False
    try:
        directory = cache.cache_root()
        memo = toolchain.Memo(None)
        _check_tools(report, memo, gpus)
        _check_archs(report, gpus)
        _check_cache(report, directory)
        ok = _check_modules(report, directory, memo, gpus)
    except RuntimeError as error:
        report.problem(str(error))
    return {**report.found, "problems": report.problems, "ok": ok}


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)

    def section(title: str, rows: dict[str, Any]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold")
        table.show_header, table.box, table.pad_edge = False, None, False
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(f"  {name}", escape(str(value)))
        console.print(table)

    section("Versions", {name: value or "not installed" for name, value in found["versions"].items()})
    tools = {}
    for name, tool in found.get("tools", {}).items():
        text = tool and " ".join(str(tool[part]) for part in ("version", "path") if tool.get(part))
        tools[name] = text or "not found"
        if tool and "found_by" in tool:
            tools[name] += f" (from {tool['found_by']})"
    section("Tools", tools)
    gpus = {f"{gpu['index']}": f"{gpu['name']}, compute capability {gpu['capability']}" for gpu in found["gpus"]}
    cuda = f"for CUDA {found['torch_cuda']}" if found["torch_cuda"] else "without CUDA"
    section("GPUs", gpus or {"none": f"visible to torch, which is built {cuda}"})
    archs = found.get("architectures", {})
    section("Architectures", {" ".join(archs.get("archs", [])) or "none": f"from {archs.get('from') or 'no GPU'}"})
    if "cache" in found:
        state = found["cache"]
        section(
            "Cache",
            {
                "directory": state["directory"] + ("" if state["exists"] else " (not made yet)"),
                "entries": f"{state['entries']}, {state['bytes'] / 1e6:.1f} MB",
                "writable": "yes" if state["writable"] else "no",
                "strict": "yes: nothing is compiled" if state["strict"] else "no",
                "prebuilt": os.pathsep.join(state["prebuilt"]) or "none",
            },
        )
    section("Modules", found.get("modules", {}))
    for problem in found["problems"]:
        console.print(f"[bold red]![/] {escape(problem['problem'])}")
        if problem["remedy"]:
            console.print(f"  [green]->[/] {escape(problem['remedy'])}")
    backends = "CPU and CUDA" if found["gpus"] else "CPU"
    works, broken = f"[green]hotplan works here ({backends})[/]", "[bold red]hotplan does not work here[/]"
    console.print(works if found["ok"] else broken)


def diagnose_sglang() -> dict[str, Any]:
    """Everything that `hotplan doctor --sglang` prints. A process of its own loads the plugins, as a server does."""
    if importlib.util.find_spec("sglang") is None:
        return {"ok": False, "error": "SGLang is not installed in this environment", "targets": []}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "report.json")
        code = f"from hotplan.integrations.sglang import write_report; write_report({str(path)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if not path.exists():
            return {"ok": False, "error": f"SGLang does not start here:\n{done.stdout.strip()}", "targets": []}
        report = json.loads(path.read_text())
    families = report["families"]
    wanted = [row for row in report["targets"] if families is None or row["family"] in families]
    return {**report, "ok": all(row["served"] for row in wanted), "log": done.stdout.strip()}


def _print_sglang(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160)
    if "error" in found:
        console.print(f"[bold red]![/] {escape(found['error'])}", soft_wrap=True)
        return
    families = found["families"]
    enabled = "unknown" if families is None else " and ".join(families) or "off"
    table = Table(title=f"SGLang {found['version']}, families: {enabled}", title_justify="left", title_style="bold")
    table.box, table.pad_edge = None, False
    table.add_column("  SGLang's function", style="cyan", no_wrap=True)
    table.add_column("served by")
    table.add_column("why")
    reasons = list(dict.fromkeys(row["why_not"] for row in found["targets"] if row["why_not"]))
    for row in found["targets"]:
        who = "[green]hotplan[/]" if row["served"] else "SGLang" if row["found"] else "nobody"
        why = escape(f"[{1 + reasons.index(row['why_not'])}]") if row["why_not"] else ""
        table.add_row("  " + row["target"].removeprefix("sglang.kernels.ops."), who, why)
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        console.print(escape(f"[{number}] {reason}"), soft_wrap=True)
    if found["ok"]:
        console.print("[green]everything that is enabled is served by hotplan[/]" if families else "nothing is enabled")
        return
    if any("its log" in reason for reason in reasons) and found["log"]:
        console.print("[bold]Log[/]")
        console.print(escape(found["log"]), soft_wrap=True)
    console.print("[bold red]not everything that is enabled is served by hotplan[/]")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--sglang", is_flag=True, help="Load SGLang's plugins and say which of its functions hotplan serves.")
def doctor(as_json: bool, sglang: bool) -> None:
    """Print versions, compilers, cache and GPUs, and what would go wrong.

    Exit status 0 if the CPU backend can be used and, where a GPU is visible, the CUDA backend; with --sglang, if all
    functions of the enabled families are served; 1 otherwise.
    """
    found = diagnose_sglang() if sglang else diagnose()
    if as_json:
        click.echo(json.dumps(found, indent=1))
    else:
        (_print_sglang if sglang else _print)(found)
    sys.exit(0 if found["ok"] else 1)
