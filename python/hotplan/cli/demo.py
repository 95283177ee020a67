"""``hotplan demo``: the replay on a small generated trace, checked, and one plan to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from hotplan.cli.common import device_option, one_line_errors, ready_device, run_with_progress

if TYPE_CHECKING:
    from hotplan.replay.scheduler import Step
    from hotplan.replay.steps import Built


class Excerpt:
    """Keeps, as text, the c4 plan of the first prefill step that has several requests, and of a decode step."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._texts: dict[str, tuple[bool, str]] = {}

    def __call__(self, step: Step, built: Built) -> None:
        from hotplan.plans import describe
        from hotplan.replay.verify import describe_step

        known = self._texts.get(step.kind)
        several = len(step.requests) > 1
        if known is None or (several and not known[0]):
            kind = "decode" if step.kind == "decode" else None
            head = f"{describe_step(step)}, c4:"
            self._texts[step.kind] = (several, f"{head}\n{describe(built.plans[4], kind, limit=self._rows)}")

    def text(self) -> str:
        return "\n\n".join(text for _, text in self._texts.values())


@click.command()
@device_option()
@click.option("--requests", type=click.IntRange(1, 10_000), default=32, show_default=True, help="Size of the trace.")
@click.option("--spec", "draft_tokens", type=int, default=0, show_default=True, metavar="N", help="Draft tokens.")
@click.option("--rows", type=click.IntRange(0, 1000), default=8, show_default=True, help="Rows of a plan to show.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the trace.")
def demo(device: str, requests: int, draft_tokens: int, rows: int, seed: int) -> None:
    """Serve a small generated trace: every plan is built, compared with the reference, and one of each kind shown.

    Compiles the operators on the first run, which takes a few seconds.
    """
    from hotplan.replay import report
    from hotplan.replay.runner import Replay
    from hotplan.replay.settings import Settings
    from hotplan.replay.trace import generate_trace

    excerpt = Excerpt(rows)
    with one_line_errors():
        # Few slots, so that cached prefixes are evicted and pages used again even in so short a trace.
        settings = Settings(draft_tokens=draft_tokens, slots=2**15, max_running=16, seed=seed)
        trace = generate_trace(requests, seed=seed)
        served = Replay(trace, settings, ready_device(device), check=True)
        result = run_with_progress(served, (excerpt,))

    from rich.console import Console

    click.echo(excerpt.text() + "\n")
    Console().print(report.as_table(result))
    if result.interrupted:
        raise SystemExit(130)
