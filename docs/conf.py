"""Sphinx: ``sphinx-build -W -n -b html docs OUT``, with hotplan and its ``docs`` extra installed.

What the code knows (commands, layouts, results, plots) is not written down again: `made.py` makes it while the site is
built, where a page says ``<!-- made: NAME -->``.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import made
from sphinx.util import logging

import hotplan

project = "hotplan"
author = "the hotplan authors"
project_copyright = author
version = release = hotplan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"hotplan {release}"
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 3

default_role = "code"  # docstrings of internal modules write `name`
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_param = False  # "a, b: text" stays one entry
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # a list, as of arguments
python_maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# Types of other libraries, which have no page here. No intersphinx: a build needs no network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|tvm_ffi|collections|pathlib|os|typing)\..*"),
    ("py:.*", r"Tensor|Path|Any|Mapping|Sequence|Iterable|Callable|_Packed"),
    ("py:.*", r"hotplan\.hisparse\.device_buffer\._SpecState"),
]

_log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------------------
# What is made while the site is built


def _fill(app, docname: str, source: list[str]) -> None:
    """Replaces ``<!-- made: NAME -->``. Pictures are made beside the output, and named relative to this directory."""
    images = Path(app.outdir, "_made")

    def made_text(found: re.Match[str]) -> str:
        text = makers[found[1]]()
        return text.replace(images.as_posix(), "/" + os.path.relpath(images, app.srcdir))

    makers = made.makers(images)
    source[0], count = re.subn(r"<!-- made: ([\w ]+) -->", made_text, source[0])
    if count:
        app.env.note_reread()  # it does not see when the code behind a page changes


# ----------------------------------------------------------------------------------------------------
# The reference is complete

PUBLIC = (
    "hotplan",
    "hotplan.hisparse",
    "hotplan.plans",
    "hotplan.reference",
    "hotplan.jit",
    "hotplan.integrations.sglang",
    "hotplan.integrations.torch_library",
    "hotplan.integrations.vllm",
)


def _check_reference(app, env) -> None:
    """A warning for every public name that no page documents; with -W the build fails."""
    documented = env.get_domain("py").objects
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            if not _is_documented(module, name, documented):
                _log.warning("%s.%s is public, but no page documents it", module, name)


def _is_documented(module: str, name: str, documented) -> bool:
    home = getattr(getattr(importlib.import_module(module), name), "__module__", module)
    return f"{module}.{name}" in documented or f"{home}.{name}" in documented  # what several modules name is shown once


def _skip(app, what: str, name: str, value, skip: bool, options) -> bool | None:
    """Fields of named tuples: their class says what they are, and they say "Alias for field number 0"."""
    return True if type(value).__name__ == "_tuplegetter" else None


def setup(app) -> None:
    app.connect("autodoc-skip-member", _skip)
    app.connect("source-read", _fill)
    app.connect("env-check-consistency", _check_reference)
