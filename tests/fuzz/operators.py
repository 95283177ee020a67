"""All public operators, by their names: importing the builders fills the registry."""

from __future__ import annotations

from fuzz import compress_calls, device_buffer_calls, hot_buffer_calls, residency_calls
from fuzz.calls import REGISTRY

__all__ = ["REGISTRY", "compress_calls", "device_buffer_calls", "hot_buffer_calls", "residency_calls"]
