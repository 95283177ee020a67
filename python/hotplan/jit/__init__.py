"""Compiling on first use: `load(family, backend)` gives a module, `build(...)` prepares one ahead of time.

Variables: HOTPLAN_CACHE_DIR (default $SGLANG_CACHE_DIR/hotplan, $XDG_CACHE_HOME/hotplan, ~/.cache/hotplan),
HOTPLAN_PREBUILT_DIR (directories that `hotplan build --out` made, searched first and never written),
HOTPLAN_STRICT=1 (never compile), HOTPLAN_CUDA_ARCHS (like 9.0a,10.0a; default: the visible GPUs'), CXX and
CUDA_HOME (which compilers).
"""

from hotplan.jit.key import families
from hotplan.jit.loader import Built, build, load

__all__ = ["Built", "build", "families", "load"]
