"""Makes the torchvision that is installed importable beside a build of torch for CPUs.

SGLang imports torchvision. What PyPI has is built for CUDA: beside a CPU build of torch its library of operators does
not load, and its Python half then fails, because it describes two operators that do not exist. This package stands
before it on the path, declares the two and becomes the other.
"""

import importlib.machinery
import sys
from pathlib import Path

import torch

_names = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_others = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent.parent]
_spec = importlib.machinery.PathFinder.find_spec("torchvision", _others)
if _spec is None:
    raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
__file__, __path__ = _spec.origin, list(_spec.submodule_search_locations)
exec(compile(Path(__file__).read_text(), __file__, "exec"))
