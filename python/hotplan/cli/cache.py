"""``hotplan cache``: what is in the cache, what of it this installation can use, and removing the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotplan.cli.common import one_line_errors

if TYPE_CHECKING:
    from hotplan.jit.upkeep import Entry

_DIR = click.option(
    "--dir", "directory", type=click.Path(file_okay=False, path_type=Path), help="Another directory than the cache."
)
_DRY = click.option("--dry-run", is_flag=True, help="Only say what would be removed.")


def _root(directory: Path | None) -> Path:
    from hotplan.jit.cache import cache_root

    return cache_root() if directory is None else directory.expanduser().absolute()


@click.group()
def cache() -> None:
    """Look at the directory of compiled modules, or take away what is no longer needed.

    It is HOTPLAN_CACHE_DIR, or hotplan inside SGLANG_CACHE_DIR, XDG_CACHE_HOME or ~/.cache.
    """


@cache.command()
@_DIR
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def info(directory: Path | None, as_json: bool) -> None:
    """List modules with size and age, and say which of them this installation can use.

    Without --dir also those of HOTPLAN_PREBUILT_DIR.
    """
    from hotplan.jit.cache import prebuilt_dirs
    from hotplan.jit.upkeep import survey

    with one_line_errors():
        shipped = prebuilt_dirs()
        roots = [_root(directory)] if directory else [_root(None), *shipped]
        found = [(root, survey(root, root in shipped), root in shipped) for root in roots]
    if as_json:
        listed = [
            {
                "directory": str(root),
                "prebuilt": prebuilt,
                "bytes": sum(entry.bytes for entry in entries),
                "entries": [entry.as_dict() for entry in entries],
            }
            for root, entries, prebuilt in found
        ]
        click.echo(json.dumps(listed, indent=1))
        return
    for root, entries, prebuilt in found:
        _print(root, entries, prebuilt)


def _print(root: Path, entries: list[Entry], prebuilt: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    size = sum(entry.bytes for entry in entries) / 1e6
    click.echo(f"{root}{' (prebuilt)' if prebuilt else ''}: {len(entries)} entries, {size:.1f} MB")
    if not entries:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("  entry", no_wrap=True, style="cyan")
    for name in ("archs", "hotplan", "MB", "days"):
        table.add_column(name, justify="right" if name in ("MB", "days") else "left", no_wrap=True)
    table.add_column("usable here", overflow="fold")
    for entry in entries:
        usable = f"no: {escape(entry.why_not)}" if entry.why_not else "[green]yes[/]"
        numbers = (f"{entry.bytes / 1e6:.2f}", f"{entry.days:.1f}")
        table.add_row("  " + entry.path.name, " ".join(entry.archs), entry.version, *numbers, usable)
    Console(width=160).print(table)


@cache.command()
@_DIR
@click.option("--days", type=click.FloatRange(min=0), metavar="N", help="Also what was built more than N days ago.")
@_DRY
def prune(directory: Path | None, days: float | None, dry_run: bool) -> None:
    """Remove damaged modules, those of other versions of hotplan or tvm-ffi, and what killed builds left.

    Modules of other compilers or machines, which a shared cache may hold, stay, unless --days says otherwise; logs of
    failed compiles also go by age alone, and so does what a build on another machine left: after a day. What another
    process is building stays in any case.
    """

    def old(entry: Entry) -> bool:
        return days is not None and entry.days > days

    _remove(directory, lambda entry: entry.outdated or old(entry), dry_run)


@cache.command()
@_DIR
@_DRY
def clear(directory: Path | None, dry_run: bool) -> None:
    """Remove all modules and logs. What another process is building stays."""
    _remove(directory, lambda entry: True, dry_run)


def _remove(directory: Path | None, chosen: Any, dry_run: bool) -> None:
    from hotplan.jit.upkeep import remove, remove_drafts, survey

    busy: list[str] = []
    with one_line_errors():
        root = _root(directory)
        victims = [entry for entry in survey(root) if chosen(entry)]
        gone = victims if dry_run or not victims else remove(root, victims, busy.append)
        if not dry_run:
            remove_drafts(root)
    for entry in gone:
        click.echo(f"{'would remove' if dry_run else 'removed'} {entry.path.name}")
    for what in busy:
        click.echo(f"kept {what}: another process is building it", err=True)
    size = sum(entry.bytes for entry in gone) / 1e6
    click.echo(f"{root}: {'would free' if dry_run else 'freed'} {size:.1f} MB")
