"""``hotplan inspect``: a saved plan tensor as a table."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

KINDS = ("compress", "write", "decode", "swap")


def _load(path: Path) -> Any:
    """What a .npy, .npz or torch.save'd file holds. Raises ClickException; never runs code from the file."""
    try:
        if path.suffix in (".npy", ".npz"):
            import numpy as np

            loaded = np.load(path, allow_pickle=False)
            return dict(loaded) if path.suffix == ".npz" else loaded
        import torch

        from hotplan.plans import PrefillPlan

        with torch.serialization.safe_globals([PrefillPlan]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise click.ClickException(f"{path}: not a saved tensor or array: {reason}") from None


def _plans(value: Any, name: str = "", hint: str | None = None) -> Iterator[tuple[str, Any, str | None]]:
    """(where, plan, kind or None) of everything in nested containers that is a tensor, an array or a PrefillPlan."""
    import numpy as np
    import torch

    from hotplan.plans import PrefillPlan

    if isinstance(value, (torch.Tensor, np.ndarray, PrefillPlan)):
        yield name, value, None if isinstance(value, PrefillPlan) else hint
    elif isinstance(value, dict):
        # plan_step_decode gives {4: plan, 128: plan}; plan_step_prefill gives such a dictionary of PrefillPlans.
        by_ratio = bool(value) and set(value) <= {4, 128}
        for key, item in value.items():
            words = [kind for kind in KINDS if kind in str(key).lower()]
            inner = "decode" if by_ratio else words[0] if len(words) == 1 else hint
            yield from _plans(item, f"{name}[{key!r}]", inner)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from _plans(item, f"{name}[{i}]", hint)
    else:
        where = f" at {name}" if name else ""
        kind = type(value).__name__
        raise click.ClickException(f"expected tensors in dictionaries, tuples or lists, got {kind}{where}")


def _kind(plan: Any, hint: str | None, asked: str | None) -> tuple[str | None, str]:
    """The kind to read a plan as, and a remark where that is a guess."""
    from hotplan.plans import PrefillPlan

    if isinstance(plan, PrefillPlan) or getattr(plan.dtype, "names", None):
        return None, ""  # says itself what it is
    width = plan.shape[-1] if plan.ndim else 0
    if width == 8:
        return "write", ""
    if asked and (asked != "write" or width != 16):
        return asked, ""
    if plan.ndim > 2:
        return "swap", ""
    if hint:
        # The online plans' write half has compress rows.
        return ("compress" if hint == "write" else hint), ""
    return "compress", "16-byte rows, read as compress rows; --kind decode reads them as decode rows"


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), help="What 16-byte rows are, where the file does not say.")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Rows to show of each plan.")
def inspect(file: Path, kind: str | None, limit: int) -> None:
    """Print FILE as a table.

    FILE holds a plan saved with torch.save (a tensor, a PrefillPlan, or dictionaries, tuples and lists of them) or with
    numpy (.npy, .npz). Rows of 8 bytes are a write plan; of 16 bytes, compress or decode rows.
    """
    from hotplan.plans import describe

    found = False
    for where, plan, hint in _plans(_load(file)):
        chosen, remark = _kind(plan, hint, kind)
        label = where or file.name
        try:
            text = describe(plan, chosen, limit)
        except (TypeError, ValueError) as error:
            raise click.ClickException(f"{label}: {error}") from None
        click.echo(("\n" if found else "") + f"{label}: {text}" + (f"\n({remark})" if remark else ""))
        found = True
    if not found:
        raise click.ClickException(f"{file}: holds no tensors")
