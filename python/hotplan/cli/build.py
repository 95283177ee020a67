"""``hotplan build``: all modules ahead of time, for the cache or for a directory that goes into an image."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotplan.cli.common import one_line_errors

if TYPE_CHECKING:
    from hotplan.jit.prebuild import Module, Outcome
    from hotplan.jit.usage import KernelUsage


def _families(text: str | None) -> list[str]:
    from hotplan.jit import families

    known = families()
    wanted = known if text is None else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise click.UsageError(f"--family: expected some of {','.join(known)}, got {text!r}")
    return list(dict.fromkeys(wanted))


def _archs(text: str | None) -> tuple[str, ...]:
    from hotplan.jit.toolchain import parse_archs, target_archs

    if text is not None:
        return parse_archs(text, "--arch")
    try:
        return target_archs()[0]
    except RuntimeError as error:
        raise click.UsageError(f"{error}  Or say --arch, or --no-cuda.") from None


@click.command()
@click.option("--arch", "arch", metavar="LIST", help="GPUs to build for, like 9.0a,10.0a.  [default: those visible]")
@click.option("--family", metavar="LIST", help="Only these families, like compress,hisparse.  [default: all]")
@click.option("--cpu/--no-cpu", default=True, show_default=True, help="Build the modules for tensors on the CPU.")
@click.option("--cuda/--no-cuda", default=True, show_default=True, help="Build the modules for CUDA tensors.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Build into DIR, not into the cache.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Modules at a time.  [default: one per core]")
@click.option("--report", "with_report", is_flag=True, help="Registers, shared memory and spills of every kernel.")
@click.option("--json", "as_json", is_flag=True, help="Print what was built, and the report, as JSON.")
def build(
    arch: str | None,
    family: str | None,
    cpu: bool,
    cuda: bool,
    out: Path | None,
    jobs: int | None,
    with_report: bool,
    as_json: bool,
) -> None:
    """Compile the modules ahead of time. Needs no GPU.

    Each CUDA module holds code for all architectures of --arch, and is found on a machine with any of these GPUs. A
    directory made with --out can be shipped, also read-only: HOTPLAN_PREBUILT_DIR=DIR makes hotplan load from it, and
    DIR/manifest.json says what is in it. What is built already is not built again; HOTPLAN_STRICT does not count here.
    """
    from hotplan.jit import cache, prebuild

    if not cpu and not cuda:
        raise click.UsageError("--no-cpu and --no-cuda leave nothing to build")
    with one_line_errors():
        wanted = prebuild.modules(_families(family), _archs(arch) if cuda else (), cpu)
        directory = cache.cache_root() if out is None else out.expanduser().absolute()
        jobs = jobs or prebuild.usable_cores()
        start = time.perf_counter()
        click.echo(f"building {len(wanted)} modules, up to {jobs} at a time", err=True)
        outcomes = prebuild.build_all(wanted, directory, jobs, _Progress(len(wanted)))
        failed = [outcome for outcome in outcomes if outcome.error]
        index = cache.write_index(directory) if out is not None and len(failed) < len(outcomes) else None
        click.echo(f"{len(wanted) - len(failed)} of {len(wanted)} modules in {directory}", err=True)
        usage = _usage([one.module for one in outcomes if one not in failed], jobs) if with_report else []
    if as_json:
        document: dict[str, Any] = {
            "directory": str(directory),
            "manifest": index and str(index),
            "seconds": round(time.perf_counter() - start, 3),
            "modules": [_as_dict(outcome) for outcome in outcomes],
        }
        if with_report:
            document["kernels"] = [kernel.as_dict() for kernel in usage]
        click.echo(json.dumps(document, indent=1))
    elif with_report:
        _print_usage(usage)
    if failed:
        raise click.ClickException("\n".join(f"{outcome.module.label}: {outcome.error}" for outcome in failed))


class _Progress:
    """A line on stderr as each module ends."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.ended = 0

    def __call__(self, outcome: Outcome) -> None:
        self.ended += 1
        if outcome.error:
            text = "failed"
        else:
            size = Path(outcome.path).stat().st_size / 1e6
            text = f"{outcome.seconds:.1f} s, {size:.1f} MB" if outcome.seconds else f"was there, {size:.1f} MB"
        click.echo(f"[{self.ended}/{self.total}] {outcome.module.label}: {text}", err=True)


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    module = outcome.module
    found: dict[str, Any] = {"family": module.family, "backend": module.backend, "archs": list(module.archs)}
    if outcome.error:
        return {**found, "error": outcome.error}
    path = Path(outcome.path)
    manifest = json.loads((path.parent / "manifest.json").read_bytes())
    built = {name: manifest.get(name) for name in ("key", "sha256", "bytes")}
    return {**found, "path": str(path), "compiled_s": round(outcome.seconds, 3), **built}


def _usage(modules: list[Module], jobs: int) -> list[KernelUsage]:
    from hotplan.jit.key import make_recipe
    from hotplan.jit.toolchain import Memo
    from hotplan.jit.usage import kernel_usage

    memo = Memo(None)
    recipes = [make_recipe(one.family, one.backend, memo, one.archs) for one in modules if one.backend == "cuda"]
    return kernel_usage(recipes, jobs)


def _print_usage(usage: list[KernelUsage]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    archs = list(dict.fromkeys(kernel.arch for kernel in usage))
    table = Table(title="Registers of a thread by architecture, bytes spilled (stores + loads)", title_justify="left")
    table.box, table.pad_edge = None, False
    table.add_column("kernel", style="cyan", no_wrap=True)
    table.add_column("static shared", justify="right")
    for arch in archs:
        table.add_column(arch, justify="right", no_wrap=True)
    kernels: dict[tuple[str, str], dict[str, KernelUsage]] = {}
    for one in usage:
        kernels.setdefault((one.family, one.kernel), {})[one.arch] = one
    for (_, name), by_arch in sorted(kernels.items()):
        cells = []
        for arch in archs:
            kernel = by_arch.get(arch)
            spilled = f" [bold red]{kernel.spill_stores} + {kernel.spill_loads}[/]" if kernel and kernel.spills else ""
            cells.append(f"{kernel.registers}{spilled}" if kernel else "")
        shared = sorted({str(kernel.shared) for kernel in by_arch.values()})
        table.add_row(escape(name), "/".join(shared), *cells)
    Console(width=100 + 16 * len(archs)).print(table)
    spilling = sorted({kernel.kernel for kernel in usage if kernel.spills})
    click.echo(f"{len(kernels)} kernels; " + (f"spills in {', '.join(spilling)}" if spilling else "no spills"))
