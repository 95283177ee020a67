"""Tests that load SGLang itself run where it is installed, with everything that its modules import; see .ci/run."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch

_SHIM = str(Path(__file__).parent / "torchvision_for_cpu")

if torch.version.cuda is None and torch.version.hip is None and importlib.util.find_spec("torchvision"):
    sys.path.insert(0, _SHIM)
    os.environ["PYTHONPATH"] = os.pathsep.join([_SHIM, *filter(None, [os.environ.get("PYTHONPATH")])])
