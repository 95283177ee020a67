"""What the JIT tells the user: logger `hotplan.jit`, or standard error where nobody configured logging."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("hotplan.jit")


def say(message: str, *, warning: bool = False, to: logging.Logger = logger) -> None:
    """One line. Where logging is not configured Python drops INFO, but a compile should not be silent."""
    level = logging.WARNING if warning else logging.INFO
    if to.hasHandlers():
        to.log(level, message)
    elif level >= (to.level or level):
        print(f"hotplan: {message}", file=sys.stderr, flush=True)
