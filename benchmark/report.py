"""Results of a benchmark: JSON lines on disk, tables on a terminal, markdown for the documentation.

    python benchmark/report.py benchmark/results/*.jsonl

prints saved results as markdown. A file holds one run: its first line is the meta record, every other line a
row:

    section    the table it belongs to
    case       first column, such as "8 x 8191"
    plans      second column, such as "c4 + c128"
    metric     "graph" (GPU us), "wall" (host us), or whatever the benchmark names
    ours       Stats as a dict, or null; peer the same, with peer_name, and peer_note where there is no number
    ratio      ours / peer, below 1 is faster
    goal, met  the goal in the row's unit, and whether the median reaches it
    checked    what the result was compared with, or "WRONG: ..."
    columns    what case and plans are called in the table, where these words do not fit
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Meta = dict[str, Any]

REPO = Path(__file__).resolve().parents[1]

# Read only: nothing here sets a clock, a limit or a mode.
_SMI_FIELDS = (
    "name",
    "driver_version",
    "clocks.current.sm",
    "clocks.current.memory",
    "clocks.max.sm",
    "clocks.max.memory",
    "power.limit",
    "temperature.gpu",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)


def make_row(
    section: str,
    case: str,
    plans: str,
    metric: str,
    ours: Mapping[str, Any] | None,
    peer: Mapping[str, Any] | None = None,
    *,
    peer_name: str | None = None,
    peer_note: str | None = None,
    goal: float | None = None,
    checked: str | None = None,
    unit: str = "us",
    **more: Any,
) -> Row:
    """One row. ``ours`` and ``peer`` are ``Stats.as_dict()`` or any mapping with a ``median`` in ``unit``.

    The ratio and whether the goal is met follow from them. A row whose result was wrong meets no goal.
    """
    right = not is_wrong({"checked": checked})
    row: Row = {
        "kind": "row",
        "section": section,
        "case": case,
        "plans": plans,
        "metric": metric,
        "unit": unit,
        "ours": dict(ours) if ours else None,
        "peer_name": peer_name,
        "peer": dict(peer) if peer else None,
        "peer_note": peer_note,
        "ratio": round(ours["median"] / peer["median"], 4) if ours and peer else None,
        "goal": goal,
        "met": bool(right and ours["median"] <= goal) if ours and goal is not None else None,
        "checked": checked,
    }
    row.update(more)
    return row


def is_wrong(row: Mapping[str, Any]) -> bool:
    """Whether the result behind a row was found to be wrong (or there was none, because the call raised)."""
    return str(row.get("checked") or "").startswith("WRONG")


def first_line(error: BaseException) -> str:
    """An exception as a cell of a table."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def collect_meta(benchmark: str, *, device: str = "cuda", device_index: int = 0, **more: Any) -> Meta:
    """Where a run was made: GPU, driver, clocks as they are now, versions, commit, command line, date (UTC).

    What cannot be read is left out or null. Absolute paths on the command line are cut to their last part.
    """
    import torch

    meta: Meta = {
        "kind": "meta",
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(_short(a) for a in sys.argv)]),
        "commit": _commit(),
        "versions": {
            "hotplan": _version("hotplan") or getattr(sys.modules.get("hotplan"), "__version__", None),
            "torch": torch.__version__,
            "tvm-ffi": _version("apache-tvm-ffi"),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "host": {"cpus": len(os.sched_getaffinity(0)), "machine": platform.machine(), "cpu": _cpu_name()},
        "device": device,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(device_index)
        meta["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "sms": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            **_nvidia_smi(str(getattr(properties, "uuid", "")), device_index),
        }
    meta.update(more)
    return meta


def write_results(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> None:
    """Write one run as JSON lines, the meta record first. An existing file is replaced as a whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    with partial.open("w") as f:
        for record in ({**meta, "kind": "meta"}, *({"kind": "row", **row} for row in rows)):
            f.write(json.dumps(record) + "\n")
    partial.replace(target)


def read_results(path: str | os.PathLike[str]) -> tuple[Meta, list[Row]]:
    """Meta and rows of a file written by `write_results`. Raises ValueError naming the line that is
    neither."""
    meta: Meta = {}
    rows: list[Row] = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        record = json.loads(line)
        kind = record.get("kind")
        if kind == "meta":
            meta = record
        elif kind == "row":
            rows.append(record)
        else:
            raise ValueError(f"{path}:{number}: kind: expected 'meta' or 'row', got {kind!r}")
    return meta, rows


def tables(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, header, body) per section, in order of appearance; a line per (case, plans), columns per
    metric."""
    sections: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        sections.setdefault(row["section"], []).append(row)
    result = []
    for title, members in sections.items():
        metrics = list(dict.fromkeys(row["metric"] for row in members))
        header = list(members[0].get("columns") or ("case", "plans"))
        shown: dict[str, list[str]] = {}
        for metric in metrics:
            of_metric = [row for row in members if row["metric"] == metric]
            peers = list(dict.fromkeys(row["peer_name"] for row in of_metric if row.get("peer_name")))
            peer = peers[0] if len(peers) == 1 else "peer"
            columns = ["ours"]
            header.append(f"{metric} {_unit(of_metric)} [min..p90]")
            if peers:
                columns += ["peer", "ratio"]
                header += [peer, "ratio"]
            if any(row.get("goal") is not None for row in of_metric):
                columns += ["goal", "met"]
                header += ["goal", "met"]
            shown[metric] = columns
        checks = any(row.get("checked") for row in members)
        if checks:
            header.append("checked")

        lines: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for row in members:
            lines.setdefault((row["case"], row["plans"]), {})[row["metric"]] = row
        body = []
        for (case, plans), by_metric in lines.items():
            cells = [case, plans]
            for metric in metrics:
                row = by_metric.get(metric)
                cells += [_cell(row, column) if row else "-" for column in shown[metric]]
            if checks:
                cells.append(_worst_check(by_metric.values()))
            body.append(cells)
        result.append((title, header, body))
    return result


def print_tables(rows: Iterable[Mapping[str, Any]]) -> None:
    """The tables on a terminal, or as plain text of sufficient width where the output is a file or a pipe."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    probe = Console()
    console = probe if probe.is_terminal else Console(width=180)
    for title, header, body in tables(rows):
        table = Table(title=escape(title), title_justify="left", title_style="bold")
        for index, name in enumerate(header):
            table.add_column(escape(name), justify="left" if index < 2 or name == "checked" else "right")
        for cells in body:
            table.add_row(*(_coloured(escape(cell)) for cell in cells))
        console.print(table)


def publish(rows: Sequence[Mapping[str, Any]], meta: Mapping[str, Any], out: str | os.PathLike[str] | None) -> int:
    """The end of a run: the results to `out`, if that is given, the tables and what was wrong to the terminal.

    Returns the exit status, 1 if a result of ours was wrong.
    """
    if out:
        write_results(out, rows, meta)
    print_tables(rows)
    print(describe_meta(meta))
    wrong = [row for row in rows if is_wrong(row)]
    for row in wrong:
        print(f"{row['section']}: {row['case']}, {row['plans']}, {row['metric']}: {row['checked']}", file=sys.stderr)
    return 1 if wrong else 0


def markdown(meta: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> str:
    """A run as markdown: one paragraph of where it was made, then a table per section."""
    lines = [describe_meta(meta), ""]
    for title, header, body in tables(rows):
        lines += [f"### {title}", "", _md_line(header), _md_line(["---"] * 2 + ["---:"] * (len(header) - 2))]
        lines += [_md_line(cells) for cells in body]
        lines.append("")
    return "\n".join(lines)


def describe_meta(meta: Mapping[str, Any]) -> str:
    """One line: device, driver, clocks, versions, date, command."""
    gpu = meta.get("gpu") or {}
    host = meta.get("host") or {}
    parts = [gpu.get("name") or f"CPU ({host.get('cpu') or host.get('machine') or 'unknown'})"]
    if gpu.get("driver_version"):
        parts.append(f"driver {gpu['driver_version']}")
    if gpu.get("clocks.current.sm"):
        parts.append(f"SM {gpu['clocks.current.sm']}, memory {gpu.get('clocks.current.memory')}")
    parts += [f"{name} {version}" for name, version in (meta.get("versions") or {}).items() if version]
    if meta.get("peer"):
        parts.append(str(meta["peer"]))
    if meta.get("commit"):
        parts.append(f"commit {meta['commit']}")
    if meta.get("date"):
        parts.append(str(meta["date"]))
    text = "; ".join(parts)
    return f"{text}; `{meta['command']}`" if meta.get("command") else text


def _unit(rows: Sequence[Mapping[str, Any]]) -> str:
    return rows[0].get("unit") or "us"


def _cell(row: Mapping[str, Any], column: str) -> str:
    if column == "ours":
        ours = row.get("ours")
        if not ours:
            return "-"
        spread = f" [{_number(ours['min'])}..{_number(ours['p90'])}]" if "min" in ours and "p90" in ours else ""
        return _number(ours["median"]) + spread
    if column == "peer":
        peer = row.get("peer")
        return _number(peer["median"]) if peer else row.get("peer_note") or "-"
    value = row.get(column)
    if value is None:
        return "-"
    if column == "ratio":
        return f"{value:.3f}"
    if column == "met":
        return "met" if value else "missed"
    return f"{value:g}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _worst_check(rows: Iterable[Mapping[str, Any]]) -> str:
    checks = [str(row["checked"]) for row in rows if row.get("checked")]
    wrong = [check for check in checks if is_wrong({"checked": check})]
    return wrong[0] if wrong else (checks[0] if checks else "-")


def _coloured(cell: str) -> str:
    if cell == "met":
        return "[green]met[/green]"
    if cell == "missed" or cell.startswith("WRONG"):
        return f"[red]{cell}[/red]"
    return cell


def _md_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _short(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    if not os.path.isabs(value):
        return argument
    path = Path(value)
    inside = path.is_relative_to(REPO)
    return f"{name}{equals}{path.relative_to(REPO) if inside else path.name}"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(REPO), *arguments], check=False, capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return f"{commit}, with changes" if git("status", "--porcelain", "--untracked-files=no") else commit


def _nvidia_smi(uuid: str, index: int) -> dict[str, str]:
    which = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" if uuid else str(index)
    command = ["nvidia-smi", f"--id={which}", "--query-gpu=" + ",".join(_SMI_FIELDS), "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [v.strip() for v in done.stdout.strip().split(",")]
    if done.returncode != 0 or len(values) != len(_SMI_FIELDS):
        return {}
    return {k: v for k, v in zip(_SMI_FIELDS, values, strict=True) if k != "name"}


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the given result files as markdown."""
    paths = list(sys.argv[1:] if arguments is None else arguments)
    if not paths or any(path in ("-h", "--help") for path in paths):
        print("usage: python benchmark/report.py RESULTS.jsonl...", file=sys.stderr)
        return 0 if paths else 2
    for path in paths:
        print(f"## {Path(path).stem}\n")
        print(markdown(*read_results(path)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
