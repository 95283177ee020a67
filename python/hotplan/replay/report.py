"""A replay's result as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hotplan.replay.runner import ReplayResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import FigureBase
    from rich.console import RenderableType

KINDS = ("prefill", "mixed", "decode", "verify")
_COLORS = {"prefill": "#4477aa", "mixed": "#aa3377", "decode": "#228833", "verify": "#ee6677"}
PLOT_FORMATS = (".png", ".pdf", ".svg")


def _kinds(result: ReplayResult) -> list[str]:
    return [kind for kind in KINDS if kind in result.log.kind]


def percentiles(values: np.ndarray) -> dict[str, float]:
    """p50, p99 and the maximum of at least one value."""
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(values.max()), 2)}


def _peaks(live: list[int], cached: list[int]) -> dict[str, int]:
    """The most slots at a time of running requests, and with those that only the prefix cache holds."""
    together = [a + b for a, b in zip(live, cached, strict=True)]
    return {"peak": max(live, default=0), "peak_with_cache": max(together, default=0)}


def as_dict(result: ReplayResult, trace: str = "") -> dict[str, Any]:
    """Everything in plain Python types, ready for JSON. Times of plans are in microseconds."""
    import hotplan

    log = result.log
    kinds = {}
    for kind in _kinds(result):
        kinds[kind] = {
            "steps": log.kind.count(kind),
            "requests": int(log.of(kind, "requests").sum()),
            "tokens": int(log.of(kind, "tokens").sum()),
            "plan_rows": int(log.of(kind, "rows").sum()),
            "build_us": percentiles(log.of(kind, "call_us")),
            "ready_us": percentiles(log.of(kind, "ready_us")),
        }
    return {
        "trace": trace,
        "requests": result.requests,
        "finished": result.counters.finished,
        "interrupted": result.interrupted,
        "device": result.device,
        "settings": dataclasses.asdict(result.settings),
        "steps": len(log),
        "tokens": sum(log.tokens),
        "plan_rows": sum(log.rows),
        "generated_tokens": result.counters.generated,
        "rejected_drafts": result.counters.rejected,
        "prompt_tokens": result.counters.prompt,
        "prefix_hit_tokens": result.counters.prefix_hits,
        "prefix_hit_rate": round(result.prefix_hit_rate, 6),
        "retractions": result.counters.retractions,
        "slots": {
            "full": _peaks(log.slots, log.cached_slots) | {"total": result.total_slots},
            "state": _peaks(log.state_slots, log.cached_state_slots) | {"total": result.total_state_slots},
        },
        "evicted_blocks": result.evicted_blocks,
        "evicted_states": result.evicted_states,
        "kinds": kinds,
        "checked_plans": result.checked_plans,
        "virtual_s": round(result.virtual_ms / 1e3, 3),
        "wall_s": round(result.wall_s, 3),
        "warm_up_s": round(result.warm_up_s, 3),
        "versions": {
            "hotplan": hotplan.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda if result.device.startswith("cuda") else None,
            "python": platform.python_version(),
        },
    }


def as_table(result: ReplayResult) -> RenderableType:
    """The summary for a terminal: a row per kind of step, then what happened around them."""
    from rich.console import Group
    from rich.table import Table

    log, counters = result.log, result.counters
    on_gpu = result.device.startswith("cuda")
    steps = Table(title="Plans by kind of step, c4 and c128 in one call")
    for name in ("step", "steps", "req/step", "tokens", "plan rows", "build p50", "build p99"):
        steps.add_column(name, justify="left" if name == "step" else "right")
    if on_gpu:
        steps.add_column("ready p50", justify="right")
        steps.add_column("ready p99", justify="right")
    for kind in _kinds(result):
        cells = [
            kind,
            f"{log.kind.count(kind):,}",
            f"{log.of(kind, 'requests').mean():.1f}",
            f"{int(log.of(kind, 'tokens').sum()):,}",
            f"{int(log.of(kind, 'rows').sum()):,}",
        ]
        for column in ("call_us", "ready_us")[: 1 + on_gpu]:
            times = percentiles(log.of(kind, column))
            cells += [f"{times['p50']:.1f} us", f"{times['p99']:.1f} us"]
        steps.add_row(*cells)
    steps.add_section()
    blanks = [""] * (len(steps.columns) - 5)
    steps.add_row("all", f"{len(log):,}", "", f"{sum(log.tokens):,}", f"{sum(log.rows):,}", *blanks)

    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column()

    def slots(live: list[int], cached: list[int], total: int) -> str:
        peaks = _peaks(live, cached)
        return f"peak {peaks['peak']:,} (with cached prefixes {peaks['peak_with_cache']:,}) of {total:,}"

    stopped = " (interrupted)" if result.interrupted else ""
    facts.add_row("requests", f"{counters.finished:,} of {result.requests:,} finished{stopped}")
    facts.add_row(
        "prefix reuse",
        f"{counters.prefix_hits:,} of {counters.prompt:,} prompt tokens ({100 * result.prefix_hit_rate:.1f} %)",
    )
    facts.add_row("generated", f"{counters.generated:,} tokens")
    if result.settings.draft_tokens:
        facts.add_row("rejected drafts", f"{counters.rejected:,} tokens, their slots taken back")
    facts.add_row("full slots", slots(log.slots, log.cached_slots, result.total_slots))
    facts.add_row("SWA slots", slots(log.state_slots, log.cached_state_slots, result.total_state_slots))
    facts.add_row("evicted", f"{result.evicted_blocks:,} blocks, {result.evicted_states:,} blocks' state")
    if counters.retractions:
        facts.add_row("retractions", f"{counters.retractions:,} requests prefilled again")
    rate = len(log) / result.wall_s if result.wall_s else 0.0
    facts.add_row("time", f"{result.virtual_ms / 1e3:.1f} s virtual, {result.wall_s:.1f} s real ({rate:,.0f} steps/s)")
    if result.checked_plans is None:
        facts.add_row("check", "off (--check)")
    else:
        facts.add_row("check", f"{result.checked_plans:,} plans equal the reference's; rings, slots, rows sound")
    return Group(steps, facts)


def plot_problem(path: Path) -> str | None:
    """Why a plot cannot be written to `path`, or None; for asking before a long run."""
    if path.suffix.lower() not in PLOT_FORMATS:
        return f"expected a file name ending in {', '.join(PLOT_FORMATS)}, got {path.name}"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "plots need matplotlib: pip install matplotlib (it comes with hotplan[bench])"
    return None


def plot(result: ReplayResult, path: Path, title: str = "", beside: Callable[[FigureBase], None] | None = None) -> None:
    """Draws load over virtual time, slots over virtual time, and build times by kind of step. PNG, PDF or SVG.

    `beside` may draw more into a figure of the same size, to the right.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    log = result.log
    figure = Figure(figsize=(10 if beside is None else 20, 9), layout="constrained")
    FigureCanvasAgg(figure)
    left: FigureBase = figure
    if beside is not None:
        left, right = figure.subfigures(1, 2, squeeze=False)[0]
        beside(right)
    load, memory, times = left.subplots(3, 1)
    seconds = np.array(log.start_ms) / 1e3
    kinds = np.array(log.kind)

    load.set_title(title or "replay")
    for kind in _kinds(result):
        chosen = kinds == kind
        load.plot(seconds[chosen], np.array(log.tokens)[chosen], ".", markersize=3, color=_COLORS[kind], label=kind)
    load.set(xlabel="virtual time (s)", ylabel="tokens per step", yscale="log")
    load.legend(loc="upper right", markerscale=3)

    for column, label in (("slots", "full"), ("state_slots", "SWA")):
        live = np.array(getattr(log, column))
        (line,) = memory.plot(seconds, live, drawstyle="steps-post", label=f"{label}, requests")
        together = live + np.array(getattr(log, f"cached_{column}"))
        style = {"color": line.get_color(), "linestyle": ":", "drawstyle": "steps-post"}
        memory.plot(seconds, together, label=f"{label}, with the prefix cache", **style)
    memory.set(xlabel="virtual time (s)", ylabel="slots in use", yscale="log")
    memory.legend(loc="lower right")

    column = "ready_us" if result.device.startswith("cuda") else "call_us"
    values = np.array(getattr(log, column))
    if len(values):
        low, high = max(values.min(), 0.1), max(values.max(), 0.2)
        bins = np.geomspace(low, high * 1.01, 60)
        for kind in _kinds(result):
            label = f"{kind}, p50 {np.percentile(values[kinds == kind], 50):.1f} us"
            times.hist(values[kinds == kind], bins=bins, histtype="step", color=_COLORS[kind], label=label)
        times.set_xscale("log")
        times.legend(loc="upper right")
    times.set(xlabel=f"time to build both plans of a step on {result.device} (us)", ylabel="steps")
    figure.savefig(path, dpi=120)
