"""What the pages show and the code knows, as markdown. `conf.py` puts it where a page says ``<!-- made: NAME -->``."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np

import hotplan

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmark" / "results"


def fenced(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.strip()}\n```\n"


# ----------------------------------------------------------------------------------------------------
# Commands


def _commands(command: click.Command, name: str) -> Iterator[tuple[str, str]]:
    with click.Context(command, info_name=name, terminal_width=100, max_content_width=100) as context:
        yield name, command.get_help(context)
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                yield from _commands(found, f"{name} {child}")


def commands() -> str:
    """Every command with the help that it prints."""
    from hotplan.cli.main import main

    return "\n".join(f"## {name}\n\n{fenced(text)}" for name, text in _commands(main, "hotplan"))


# ----------------------------------------------------------------------------------------------------
# Packed rows

_BYTE = 44  # pixels
_TYPES = {"<u2": "uint16", "<u4": "uint32", "<i4": "int32", "<i8": "int64"}


def _drawing(dtype: np.dtype, title: str) -> str:
    """A row as a strip of bytes with its fields. Colours are those of the text, so it suits light and dark pages."""
    width, fields = dtype.itemsize * _BYTE, dtype.fields
    assert fields is not None
    parts = [
        f'<svg class="layout" xmlns="http://www.w3.org/2000/svg" viewBox="-4 -4 {width + 8} 76" role="img"'
        f' style="width:100%;max-width:{width + 8}px" fill="currentColor" stroke="none" font-family="monospace">',
        f"<title>{html.escape(title)}</title>",
    ]
    for name, (kind, offset, *_) in fields.items():
        x, wide = offset * _BYTE, kind.itemsize * _BYTE
        middle = x + wide / 2
        parts += [
            f'<rect x="{x}" y="16" width="{wide}" height="48" fill="none" stroke="currentColor"/>',
            f'<text x="{middle}" y="37" text-anchor="middle" font-size="12">{name}</text>',
            f'<text x="{middle}" y="54" text-anchor="middle" font-size="11" opacity="0.7">{_TYPES[kind.str]}</text>',
            f'<text x="{x + 2}" y="11" font-size="11" opacity="0.7">{offset}</text>',
        ]
    end = f'<text x="{width - 2}" y="11" text-anchor="end" font-size="11" opacity="0.7">{dtype.itemsize}</text>'
    return "".join([*parts, end, "</svg>"])


def layout(name: str) -> str:
    """The picture of a packed row, and its fields with what an invalid row has in them."""
    from hotplan import plans

    dtype: np.dtype = getattr(plans, f"{name.upper()}_ROW")
    assert dtype.fields is not None
    try:
        blank = plans.invalid_rows(dtype, 1)[0]
    except TypeError:  # a layout without invalid rows
        blank = None
    lines = ["| byte | field | type |", "|---:|---|---|"]
    for field, (kind, offset, *_) in dtype.fields.items():
        lines.append(f"| {offset} | `{field}` | {_TYPES[kind.str]} |")
    if blank is not None:
        lines[:2] = ["| byte | field | type | in an invalid row |", "|---:|---|---|---|"]
        values = [f"`0x{blank[field]:X}`" if blank[field] > 9 else blank[field] for field in dtype.fields]
        lines[2:] = [f"{line} {value} |" for line, value in zip(lines[2:], values, strict=True)]
    return _drawing(dtype, f"{name} row, {dtype.itemsize} bytes") + "\n\n" + "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------------------------------
# Replays


@dataclasses.dataclass(frozen=True)
class Study:
    """A replay whose table and plot a page shows."""

    options: str
    plot: str


TRACE = "generate_trace(24, mean_gap_ms=400, mean_input=4000, max_input=24000, mean_output=150)"
STUDIES = {
    "sweep": Study("--hot-sizes 2048,3072,4096,6144,8192", "sweep.png"),
    "drift": Study("--hot-sizes 2048,3072,4096,6144,8192 --top-k-drift 0.05 --top-k-uniform 0.1", "drift.png"),
}


@functools.cache
def _trace(directory: Path) -> None:
    from hotplan.replay import trace

    trace.write_trace(directory / "trace.jsonl", eval(TRACE, vars(trace)))


def replay(name: str, images: Path) -> str:
    """Runs the study and shows command, table and plot. Raises RuntimeError with what the command said if it fails."""
    images.mkdir(parents=True, exist_ok=True)
    _trace(images)
    study = STUDIES[name]
    shown = f"replay trace.jsonl --device cpu --hisparse {study.options} --pool-row-bytes 64 --plot {study.plot}"
    package = str(Path(hotplan.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "hotplan", *shlex.split(shown)],
        cwd=images,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "110", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"hotplan {shown}: {done.stderr.strip()}")
    table = done.stdout[done.stdout.index("HiSparse, top-k") :]
    # With a width Sphinx links the picture to itself in full size.
    picture = f"{images.as_posix()}/{study.plot}\n:width: 100%\n:alt: What hotplan replay --plot draws"
    return f"{fenced('hotplan ' + shown, 'bash')}\n{fenced(table)}\n```{{image}} {picture}\n```\n"


def trace_source() -> str:
    """How to make the trace of the studies."""
    return fenced(
        f'from hotplan.replay.trace import generate_trace, write_trace\n\nwrite_trace("trace.jsonl", {TRACE})', "python"
    )


# ----------------------------------------------------------------------------------------------------
# Results


def results(directory: Path = RESULTS) -> str:
    """All result files as tables, by the code that prints them on a terminal."""
    sys.path.insert(0, str(ROOT / "benchmark"))
    try:
        import report
    finally:
        sys.path.pop(0)
    files = sorted(directory.glob("*.jsonl"))
    if not files:
        raise FileNotFoundError(f"no *.jsonl in {directory}")
    parts = []
    for path in files:
        meta, rows = report.read_results(path)
        if not rows:
            raise ValueError(f"{path}: no rows")
        parts.append(f"## {path.name}\n\n{report.markdown(meta, rows)}")
    return "\n".join(parts)


def inside_sglang() -> str:
    """SGLang's time and ours for every function that the plugin serves. docs/sglang.md has it as text, since it is read
    outside the site, too; a test compares them."""
    lines: list[tuple[str, str, float, float]] = []

    def add(file: str, section: str, function: str | None = None, form: str = "{plans}", metric: str = "graph") -> None:
        for line in (RESULTS / file).read_text().splitlines()[1:]:
            row = json.loads(line)
            if section not in row["section"] or row["metric"] != metric:
                continue
            case = form.format(case=row["case"], plans=row["plans"])
            lines.append((function or row["case"], case, row["peer"]["median"], row["ours"]["median"]))

    add("h200_sglang.jsonl", "Inside SGLang's loop")
    add("h200_sglang.jsonl", "lengths on the CPU", form="{plans}, CPU lengths, host time", metric="wall")
    add("h200_sglang_planned.jsonl", "Inside SGLang's loop")
    spec, transfer = "load_cache_to_device_buffer_spec_mla", "transfer_cache_dsv4_mla"
    add(
        "h200_device_buffer.jsonl",
        "4 speculative steps",
        spec,
        "4 steps; requests, misses of each: {case}; {plans} bytes",
    )
    add("h200_device_buffer.jsonl", "Transfer of 43 layers", transfer, "{case} items of 43 layers, {plans}")
    head = "| function | case | SGLang us | hotplan us | ratio |\n|---|---|---:|---:|---:|\n"
    return head + "".join(
        f"| {function} | {case} | {theirs:.2f} | {ours:.2f} | {ours / theirs:.2f} |\n"
        for function, case, theirs, ours in sorted(lines, key=lambda line: line[0])
    )


def makers(images: Path) -> dict[str, Callable[[], str]]:
    """NAME -> what stands there. `images` is a directory for pictures."""
    from hotplan import plans

    layouts = [name.removesuffix("_ROW").lower() for name in plans.__all__ if name.endswith("_ROW")]
    return {
        "commands": commands,
        "results": results,
        "trace": trace_source,
        **{f"layout {name}": functools.partial(layout, name) for name in layouts},
        **{f"replay {name}": functools.partial(replay, name, images) for name in STUDIES},
    }
