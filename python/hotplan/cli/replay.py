"""``hotplan replay``: a recorded trace through the serving loop."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import click

from hotplan.cli.common import device_option, one_line_errors, ready_device, run_with_progress
from hotplan.cli.hisparse import hisparse_options, observer

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Compare all results with the reference; check rings, slots and rows.")
@device_option()
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N requests.")
@click.option("--json", "json_path", type=_FILE, help="Write the summary there as JSON.")
@click.option("--plot", "plot_path", type=_FILE, help="Draw load, slots, build times, hot buffers (.png, .pdf, .svg).")
@click.option("--spec", "draft_tokens", type=int, default=0, show_default=True, metavar="N", help="Draft tokens.")
@click.option("--accept-rate", type=float, default=0.7, show_default=True, help="Chance that a draft is accepted.")
@click.option("--budget", "token_budget", type=int, default=8192, show_default=True, help="Tokens of a prefill step.")
@click.option("--max-running", type=int, default=64, show_default=True, help="Requests at a time.")
@click.option("--mixed", is_flag=True, help="Decode and verify tokens ride along in prefill steps.")
@click.option("--page-size", type=int, default=256, show_default=True, help="Tokens per page (swa_page_size).")
@click.option("--slots", type=int, metavar="TOKENS", help="Full token slots.  [default: 4 Mi or more]")
@click.option("--swa-slots", "state_slots", type=int, metavar="TOKENS", help="SWA slots.  [default: a quarter of them]")
@click.option("--window", type=int, default=128, show_default=True, help="Sliding window that keeps SWA slots alive.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, show_default=True, help="Reuse prefixes by hash_ids.")
@click.option("--pad-decode/--no-pad-decode", default=True, show_default=True, help="Pad batches to graph sizes.")
@click.option("--req-ring", is_flag=True, help="c4 ring by request, not by page (needs --no-prefix-cache).")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="For drafts and top-k ids.")
@click.option("--step-ms", type=float, default=6.0, show_default=True, help="Virtual time of a step: fixed part.")
@click.option("--token-us", type=float, default=15.0, show_default=True, help="Virtual time of a step: per token.")
@hisparse_options
def replay(
    trace: Path,
    check: bool,
    device: str,
    limit: int | None,
    json_path: Path | None,
    plot_path: Path | None,
    step_ms: float,
    token_us: float,
    hisparse: dict[str, Any] | None,
    **sizes: object,
) -> None:
    """Serve TRACE (Mooncake JSON lines) and build the real plans of every step, for c4 and c128.

    A small serving loop in virtual time: arrivals, prefix reuse, chunked prefill, decode batches or verify steps, paged
    slots that are freed and used again. Ctrl-C ends it early and prints what was done until then.

    With --hisparse every generating request also has a hot buffer in front of a host pool that holds all slots: each
    token's top-k ids, out of a model of locality or recorded, are resolved and the missing rows copied. Times of plans
    are then those of a machine whose caches are full of something else.
    """
    from hotplan.replay import report, residency_report
    from hotplan.replay.runner import Replay
    from hotplan.replay.settings import CostModel, Settings
    from hotplan.replay.trace import read_trace

    if plot_path and (problem := report.plot_problem(plot_path)):
        raise click.UsageError(f"--plot: {problem}")
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path and not path.absolute().parent.is_dir():
            raise click.UsageError(f"{option}: there is no directory {path.absolute().parent}")
    with one_line_errors():
        settings = Settings(**sizes, cost=CostModel(step_ms, token_us / 1e3))  # type: ignore[arg-type]
        records = read_trace(trace, limit)
        families = ("compress",) if hisparse is None else ("compress", "hisparse")
        served = Replay(records, settings, ready_device(device, families), check)
        residency = None if hisparse is None else observer(served, records, hisparse, check)
        result = run_with_progress(served, () if residency is None else (residency,))

    from rich.console import Console

    console = Console()
    console.print(report.as_table(result))
    summary, beside = report.as_dict(result, trace.name), None
    if residency is not None:
        console.print()
        console.print(residency_report.as_table(residency.log, result.requests))
        summary["hisparse"] = residency_report.as_dict(residency.log)
        beside = functools.partial(residency_report.draw, residency.log)
    if json_path:
        json_path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if plot_path and len(result.log):
        report.plot(result, plot_path, f"{trace.name}: {result.counters.finished} requests", beside)
    if result.interrupted:
        raise SystemExit(130)
