"""The ``--hisparse`` part of ``hotplan replay``: its options, and the observer that they ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotplan.replay.residency import HiSparse
    from hotplan.replay.runner import Replay
    from hotplan.replay.trace import TraceRecord


class SizesType(click.ParamType):
    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"expected numbers with commas between them, got {value!r}", param, ctx)


_RECORDING = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = {
    "hisparse": click.option("--hisparse", is_flag=True, help="Also keep hot buffers, with the options below."),
    "top_k": click.option("--top-k", type=int, metavar="K", help="Ids per token.  [default: 2048, or the recording's]"),
    "hot_size": click.option(
        "--hot-size", type=int, metavar="H", help="Hot slots per request.  [default: (N drafts + 2) x K]"
    ),
    "hot_sizes": click.option("--hot-sizes", type=SizesType(), help="Sweep: several hot sizes on the same ids."),
    "block_size": click.option("--block-size", type=int, default=64, show_default=True, help="Hot slots per page."),
    "row_bytes": click.option(
        "--row-bytes", type=int, default=656, show_default=True, help="KV of one token and layer: 576, 656, 1152, ..."
    ),
    "layers_per_group": click.option(
        "--layers-per-group", type=int, default=1, show_default=True, help="Layers that share their top-k ids."
    ),
    "groups": click.option(
        "--groups", type=int, default=1, show_default=True, help="Such groups; multiplies bytes, PCIe time, memory."
    ),
    "pcie_gbps": click.option(
        "--pcie-gbps",
        type=float,
        default=48.0,
        show_default=True,
        help="GB/s of gathers; 44 to 51 measured on an H200, by row size and batch.",
    ),
    "requests": click.option(
        "--hisparse-requests",
        "requests",
        type=click.IntRange(min=1),
        metavar="N",
        help="Follow N requests, spread over the trace.  [default: all; with --check as many as make 25 million ids]",
    ),
    "pool_row_bytes": click.option(
        "--pool-row-bytes",
        type=int,
        help="Bytes of a row that are kept and moved.  [default: --row-bytes; with --check on the CPU 64]",
    ),
    "recording": click.option(
        "--top-k-from",
        "recording",
        type=_RECORDING,
        metavar="FILE.npz",
        help="Recorded ids: integer arrays request [N] (line of the trace, from 0), step [N] (generated token, from 0)"
        " and ids [N, K] (positions, -1 for none).",
    ),
    "recent": click.option(
        "--top-k-recent", "recent", type=float, default=0.25, show_default=True, help="Model: share of newest tokens."
    ),
    "uniform": click.option(
        "--top-k-uniform", "uniform", type=float, default=0.05, show_default=True, help="Model: share drawn anywhere."
    ),
    "heavy_set": click.option(
        "--top-k-heavy-set",
        "heavy_set",
        type=float,
        default=2.0,
        show_default=True,
        help="Model: the rest comes from a set of heavy hitters so many times as large.",
    ),
    "drift": click.option(
        "--top-k-drift",
        "drift",
        type=float,
        default=0.01,
        show_default=True,
        help="Model: share of the heavy hitters replaced in a step.",
    ),
}
_MODEL = ("recent", "uniform", "heavy_set", "drift")


def hisparse_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options to a command, which gets them as one argument `hisparse`: a dictionary, or None without the
    flag. Options that would have no effect are refused."""

    @functools.wraps(command)
    def with_options(*args: Any, **kwargs: Any) -> None:
        context = click.get_current_context()
        values = {name: kwargs.pop(name) for name in _OPTIONS}
        flags = {p.name: p.opts[0] for p in context.command.params}
        given = [n for n in values if context.get_parameter_source(n) is not ParameterSource.DEFAULT]
        if not values.pop("hisparse"):
            if given:
                raise click.UsageError(f"{flags[given[0]]}: needs --hisparse")
            return command(*args, hisparse=None, **kwargs)
        if values["hot_size"] is not None and values["hot_sizes"] is not None:
            raise click.UsageError("--hot-size, --hot-sizes: expected one of them, got both")
        ignored = [name for name in (*_MODEL, "top_k") if name in given] if values["recording"] else []
        if ignored:
            raise click.UsageError(f"{flags[ignored[0]]}: has no effect on recorded ids (--top-k-from)")
        return command(*args, hisparse=values, **kwargs)

    for option in reversed(_OPTIONS.values()):
        with_options = option(with_options)
    return with_options


def observer(served: Replay, trace: Sequence[TraceRecord], options: dict[str, Any], check: bool) -> HiSparse:
    """The observer for `hisparse_options`' dictionary. Raises ValueError where the options do not fit."""
    from hotplan.replay.locality import Locality, LocalityModel, Recording
    from hotplan.replay.residency import HiSparse, HiSparseSettings

    options = dict(options)
    recording, top_k = options.pop("recording"), options.pop("top_k")
    hot_size, hot_sizes = options.pop("hot_size"), options.pop("hot_sizes")
    model = {name: options.pop(name) for name in _MODEL}
    server = served.scheduler.settings
    if recording is not None:
        source: Recording | LocalityModel = Recording(recording, trace, server.draft_tokens)
    else:
        source = LocalityModel(Locality(2048 if top_k is None else top_k, **model, seed=server.seed))
    sizes = hot_sizes if hot_size is None else (hot_size,)
    return HiSparse(served.scheduler, trace, HiSparseSettings(sizes or (), **options), source, check)
