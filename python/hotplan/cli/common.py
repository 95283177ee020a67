"""What subcommands share: the device option, a progress bar, errors as one line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotplan.replay.runner import Replay, ReplayResult


class DeviceType(click.ParamType):
    name = "auto|cpu|cuda|cuda:N"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
            self.fail(f"expected auto, cpu, cuda or cuda:N, got {value!r}", param, ctx)
        return value


def device_option() -> Callable[[Any], Any]:
    return click.option(
        "--device", type=DeviceType(), default="auto", show_default=True, help="auto: a GPU if one is usable."
    )


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns errors that a user can cause or repair into click's one-line errors (exit status 1)."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, AssertionError) as error:
        raise click.ClickException(str(error) or type(error).__name__) from error


def ready_device(wanted: str, families: Sequence[str] = ("compress",)) -> str:
    """Chooses the device, has its operators loaded or compiled, and says which one and why."""
    from hotplan.replay.device import choose_device

    device, reason = choose_device(wanted, families)
    click.echo(f"backend: {device} ({reason})", err=True)
    return device


def run_with_progress(replay: Replay, observers: tuple[Callable[..., None], ...] = ()) -> ReplayResult:
    """Runs a replay behind a progress bar on stderr (none where that is not a terminal)."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[steps]:,} steps, {task.fields[rate]:,.0f}/s"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=replay.requests, steps=0, rate=0.0)
        start = shown = time.perf_counter()

        def on_progress(counters: Any, steps: int) -> None:
            nonlocal shown
            now = time.perf_counter()
            if now - shown >= 0.1:  # a step may take less than drawing it
                shown = now
                progress.update(task, completed=counters.finished, steps=steps, rate=steps / (now - start))

        return replay.run(observers, on_progress)
