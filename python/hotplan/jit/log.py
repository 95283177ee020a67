"""What the JIT tells the user: logger `hotplan.jit`, or standard error where nobody configured logging."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("hotplan.jit")


def say(message: str, *, warning: bool = False) -> None:
    """One line. Where logging is not configured Python drops INFO, but a compile should not be silent."""
    level = logging.WARNING if warning else logging.INFO
    if logger.hasHandlers():
        logger.log(level, message)
    elif level >= (logger.level or level):
        print(f"hotplan: {message}", file=sys.stderr, flush=True)
