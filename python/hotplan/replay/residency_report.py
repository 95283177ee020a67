"""What the hot buffers of a replay did, as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from hotplan.replay.report import percentiles
from hotplan.replay.residency import ResidencyLog, SizeLog

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase
    from rich.console import RenderableType

ENOUGH = 1.05
"""A hot size is called enough where its misses are within so much of the largest one's."""

_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
_BINS = 150  # of virtual time


def hit_rate(size: SizeLog) -> float:
    total = sum(size.hits) + sum(size.misses)
    return sum(size.hits) / total if total else 0.0


def _with_mean(values: np.ndarray) -> dict[str, float]:
    return {"mean": round(float(values.mean()), 4)} | {k: round(v, 4) for k, v in percentiles(values).items()}


def _milliseconds(values: np.ndarray) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    numbers = {"mean": values.mean(), "p50": p50, "p99": p99, "max": values.max()}
    return {name: round(float(value), 6) for name, value in numbers.items()}


def enough(log: ResidencyLog) -> int | None:
    """The smallest hot size whose misses are within ENOUGH of the largest one's; None where only one was run."""
    if len(log.sizes) < 2:
        return None
    misses = {size.hot_size: sum(size.misses) for size in log.sizes}
    return min(size for size, count in misses.items() if count <= ENOUGH * misses[max(misses)])


def as_dict(log: ResidencyLog) -> dict[str, Any]:
    """Everything in plain Python types. Bytes, times over PCIe and memory are those of all groups together; steps are
    those in which something was resolved."""
    sizes = []
    for size in log.sizes:
        misses = np.array(size.misses)
        entry: dict[str, Any] = {
            "hot_size": size.hot_size,
            "hit_rate": round(hit_rate(size), 6),
            "hits": sum(size.hits),
            "misses": sum(size.misses),
            "cold_misses": sum(size.cold_misses),
            "gpu_bytes_per_request": log.settings.gpu_bytes(size.hot_size),
        }
        if len(log):
            entry |= {
                "misses_per_step": _with_mean(misses),
                "bytes_per_step": _with_mean(log.settings.step_bytes(misses)),
                "pcie_ms_per_step": _milliseconds(log.settings.pcie_ms(misses)),
                "resolve_us": percentiles(np.array(size.resolve_us)),
                "copy_us": percentiles(np.array(size.copy_us)),
            }
        sizes.append(entry)
    return {
        "settings": dataclasses.asdict(log.settings),
        "top_k": log.top_k,
        "source": log.source,
        "followed_requests": log.followed,
        "steps": len(log),
        "rows": sum(log.rows),
        "rows_without_ids": log.unknown_rows,
        "host_rows": log.host_rows,
        "pool_row_bytes": log.pool_row_bytes,
        "sizes": sizes,
        "enough": enough(log),
        "checked_rows": log.checked_rows if log.checked else None,
        "checked_bytes": log.checked_bytes if log.checked else None,
    }


def as_table(log: ResidencyLog, requests: int) -> RenderableType:
    """The summary for a terminal: a column per hot size, then what it is based on. `requests`: of the trace."""
    from rich.console import Group
    from rich.table import Table

    s = log.settings
    layers = f"{s.groups} groups of {s.layers_per_group} layers" if s.groups > 1 else f"{s.layers_per_group} layers"
    if s.groups * s.layers_per_group == 1:
        layers = "one layer"
    table = Table(min_width=60, title=f"HiSparse, top-k {log.top_k:,}: {layers}, rows of {s.row_bytes:,} bytes")
    table.add_column("hot slots")
    for size in log.sizes:
        table.add_column(f"{size.hot_size:,}", justify="right")
    table.add_row("MiB per request", *(f"{s.gpu_bytes(size.hot_size) / 2**20:,.2f}" for size in log.sizes))
    if len(log):
        misses = [np.array(size.misses) for size in log.sizes]
        table.add_row("hit rate", *(f"{100 * hit_rate(size):.2f} %" for size in log.sizes))
        table.add_section()
        for name, digits, values in (
            ("misses", 0, misses),
            ("MB", 3, [s.step_bytes(m) / 1e6 for m in misses]),
            ("PCIe ms", 3, [s.pcie_ms(m) for m in misses]),
            ("resolve us", 0, [np.array(size.resolve_us) for size in log.sizes]),
            ("copy us", 0, [np.array(size.copy_us) for size in log.sizes]),
        ):
            cells = [np.percentile(v, [50, 99]) for v in values]
            table.add_row(name, *(f"{a:,.{digits}f} / {b:,.{digits}f}" for a, b in cells))
        table.caption = (
            f"Lower part: p50 / p99 of a step. PCIe: the bytes at {s.pcie_gbps:g} GB/s. Resolve, copy: one group, here."
        )

    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column()
    facts.add_row("top-k ids", log.source)
    if len(log):
        facts.add_row(
            "followed",
            f"{log.followed:,} of {requests:,} requests: {sum(log.rows):,} tokens in {len(log):,} steps,"
            f" {np.mean(log.requests):.1f} requests a step",
        )
        cold = [sum(size.cold_misses) / max(sum(size.misses), 1) for size in log.sizes]
        shares = " / ".join(f"{100 * share:.1f} %" for share in cold)
        facts.add_row("cold starts", f"{shares} of the misses are in the first step after a prefill")
    else:
        facts.add_row("followed", f"{log.followed:,} of {requests:,} requests: none came to a decode step")
    if log.unknown_rows:
        facts.add_row("without ids", f"{log.unknown_rows:,} tokens of these requests are not in the recording")
    if len(log) and (smallest := enough(log)) is not None:
        largest = log.sizes[-1].hot_size
        words = "no smaller one is" if smallest == largest else f"{smallest:,} is"
        facts.add_row("how large", f"{words} within {100 * (ENOUGH - 1):.0f} % of the misses of {largest:,}")
    if log.checked:
        moved = "whole rows" if log.pool_row_bytes == s.row_bytes else f"{log.pool_row_bytes} bytes a row"
        facts.add_row(
            "check",
            f"{log.checked_rows:,} launch rows equal the reference's; {log.checked_bytes:,} bytes of hot rows"
            f" ({moved}) equal the host's",
        )
    else:
        facts.add_row("check", "off (--check)")
    return Group(table, facts)


def draw(log: ResidencyLog, figure: FigureBase) -> None:
    """Hit rate and bytes over virtual time, and over hot sizes (or the spread of misses, where there is one size)."""
    rate, traffic, last = figure.subplots(3, 1)
    if not len(log):
        rate.set_title("HiSparse: no step resolved anything")
        return
    s = log.settings
    rate.set_title(f"HiSparse, top-k {log.top_k:,}, {log.followed:,} requests followed")
    seconds = np.array(log.start_ms) / 1e3
    edges = np.linspace(seconds[0], max(seconds[-1], seconds[0] + 1e-3), min(_BINS, max(len(log) // 4, 1)) + 1)
    bins = np.clip(np.searchsorted(edges, seconds, side="right") - 1, 0, len(edges) - 2)
    steps = np.bincount(bins, minlength=len(edges) - 1)
    idle = np.where(steps > 0, 1.0, np.nan)  # times without steps are gaps in the lines
    middle = (edges[1:] + edges[:-1]) / 2
    for size, color in zip(log.sizes, _COLORS * len(log.sizes), strict=False):
        hits, misses = (np.bincount(bins, weights=v, minlength=len(steps)) * idle for v in (size.hits, size.misses))
        label = f"{size.hot_size:,} hot slots"
        rate.plot(middle, 100 * hits / np.maximum(hits + misses, 1), color=color, label=label)
        step_mb = s.step_bytes(np.array(size.misses)) / 1e6
        traffic.plot(seconds, step_mb, ".", markersize=2, alpha=0.2, color=color)
        traffic.plot(middle, s.step_bytes(misses / np.maximum(steps, 1)) / 1e6, color=color, label=f"{label}, mean")
    rate.set(xlabel="virtual time (s)", ylabel="hits (%)")
    rate.legend(loc="lower right")
    per_mb = 1 / s.pcie_gbps
    traffic.set(xlabel="virtual time (s)", ylabel="MB per step", ylim=(0, None))
    axis = traffic.secondary_yaxis("right", functions=(lambda mb: mb * per_mb, lambda ms: ms / per_mb))
    axis.set_ylabel(f"ms at {s.pcie_gbps:g} GB/s")
    traffic.legend(loc="upper right")

    if len(log.sizes) == 1:
        misses = np.array(log.sizes[0].misses) / np.array(log.requests)
        last.hist(misses, bins=60, log=True, color=_COLORS[0])
        last.set(xlabel="misses per request and step", ylabel="steps")
        return
    sizes = [size.hot_size for size in log.sizes]
    last.plot(sizes, [100 * hit_rate(size) for size in log.sizes], "o-", color=_COLORS[0])
    last.set(xlabel="hot slots per request", ylabel="hits (%)", xticks=sizes)
    times = last.twinx()
    for percentile, style in ((50, "s--"), (99, "s:")):
        values = [np.percentile(s.pcie_ms(np.array(size.misses)), percentile) for size in log.sizes]
        times.plot(sizes, values, style, color=_COLORS[1], label=f"p{percentile}")
    times.set(ylabel=f"PCIe ms per step at {s.pcie_gbps:g} GB/s", ylim=(0, None))
    times.legend(loc="center right")
