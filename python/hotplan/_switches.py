"""What is switched on: environment variables that are on or off, and the ``check`` of the compress plans."""

from __future__ import annotations

import os

_OFF = ("", "0", "false", "no", "off")


def is_on(variable: str) -> bool:
    """Whether an environment variable says anything but "", 0, false, no or off."""
    return os.environ.get(variable, "").lower() not in _OFF


def wants_check(check: bool | None) -> bool:
    """What an operator's ``check`` asks for; None: what HOTPLAN_CHECK says."""
    if check is None:
        return is_on("HOTPLAN_CHECK")
    if not isinstance(check, bool):
        raise TypeError(f"check: expected True, False or None, got {check!r:.80}")
    return check
