"""The long run is there for those who ask for it by name: `pytest tests/nightly`. Its short form always runs."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.name != "test_long_run.py":
        return None
    asked = [Path(config.invocation_params.dir, arg.split("::")[0]).resolve() for arg in config.invocation_params.args]
    named = any(path.exists() and (path == _HERE or _HERE in path.parents) for path in asked)
    return None if named else True
