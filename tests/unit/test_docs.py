"""The documentation says what is so: quoted messages, variables, layouts, results; building the site is CI's business."""

from __future__ import annotations

import ast
import importlib
import re
import types
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hotplan import plans
from hotplan.integrations import sglang

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "python" / "hotplan"
GAP = "…"

MESSAGES = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def constants(tree: ast.Module) -> dict[str, str]:
    """NAME = "text" of a module."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


@cache
def python_texts() -> list[str]:
    """All strings of the package, with a gap for what is put in. The reference words the operators' errors again."""
    paths = [path for path in PACKAGE.rglob("*.py") if PACKAGE / "reference" not in path.parents]
    trees = [ast.parse(path.read_text()) for path in paths]
    known = {name: text for tree in trees for name, text in constants(tree).items()}

    def part(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        value = node.value if isinstance(node, ast.FormattedValue) else None
        name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", None)
        return known.get(name, GAP)

    texts = []
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.JoinedStr):
            texts.append(re.sub(r"…([. ]…)+", GAP, "".join(map(part, node.values))))  # 9.0 is one gap
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return texts


@cache
def cpp_texts() -> list[str]:
    """All strings of the C++ sources; those that follow each other are one."""
    sources = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "include").rglob("*.*")]
    literals = [re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', path.read_text()) for path in sources]
    return [re.sub(r'"\s*"', "", text)[1:-1] for texts in literals for text in texts]


def occurs(message: str) -> bool:
    """In Python a message is one string, gaps and all. In C++ its fixed parts are arguments of one call."""
    if any(message.strip(GAP) in text for text in python_texts()):
        return True
    parts = [part for part in message.split(GAP) if part.strip(" :,.")]
    return all(any(part.strip() in text for text in cpp_texts()) for part in parts)


@pytest.mark.parametrize("message", [message for message in MESSAGES if " " in message])
def test_quoted_messages_are_in_the_sources(message: str) -> None:
    assert len(max(message.split(GAP), key=len)) >= 8
    assert occurs(message)


def test_the_search_finds_only_what_is_there() -> None:
    assert len(MESSAGES) > 40
    assert not occurs("no C++ compiler: looked in … on PATH=…")  # Python, a word differs
    assert not occurs("no C++ compiler: looked for … and … on PATH=…")  # a gap too many
    assert not occurs("…: expected a dense tensor, got strides …")  # C++


def test_the_table_of_variables_is_complete() -> None:
    table = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (DOCS / "jit.md").read_text(), re.MULTILINE)
    listed = set(re.findall(r"`(\w+)`", " ".join(table)))
    read = {name for text in python_texts() for name in re.findall(r"\bHOTPLAN_[A-Z_]+\b", text)}
    build_only = {"HOTPLAN_BACKEND_CUDA"}  # a macro
    assert {name for name in listed if name.startswith("HOTPLAN_")} == read - build_only
    assert {"CXX", "CUDA_HOME", "CUDA_PATH"} <= listed


# ----------------------------------------------------------------------------------------------------
# What the site makes


@pytest.fixture(scope="module")
def made() -> types.ModuleType:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(DOCS)
        return importlib.import_module("made")


def test_pages_ask_for_what_is_made_and_for_all_of_it(made: types.ModuleType, tmp_path: Path) -> None:
    asked = [name for page in DOCS.rglob("*.md") for name in re.findall(r"<!-- made: (.+?) -->", page.read_text())]
    assert sorted(asked) == sorted(made.makers(tmp_path))


C_TYPES = {"uint16_t": "<u2", "uint32_t": "<u4", "int32_t": "<i4", "int64_t": "<i8"}


@pytest.mark.parametrize(
    ("header", "struct", "name"),
    [
        ("compress", "CompressRow", "COMPRESS_ROW"),
        ("compress", "WriteRow", "WRITE_ROW"),
        ("compress", "DecodeRow", "DECODE_ROW"),
        ("hisparse", "SwapRow", "SWAP_ROW"),
    ],
)
def test_layouts_that_are_drawn_are_those_of_the_headers(header: str, struct: str, name: str) -> None:
    text = (ROOT / "include" / "hotplan" / header / "plan.h").read_text()
    body = re.search(rf"struct alignas\((\d+)\) {struct} {{\n(.*?)\n(?:\n|}})", text, re.DOTALL)
    assert body
    fields = re.findall(r"^  (\w+) (\w+);", body[2], re.MULTILINE)
    dtype = getattr(plans, name)
    assert dtype == np.dtype([(field, C_TYPES[kind]) for kind, field in fields])
    assert dtype.itemsize == int(body[1])


def test_a_drawn_layout(made: types.ModuleType) -> None:
    text = made.layout("swap")
    assert [int(x) for x in re.findall(r'<rect x="(\d+)"', text)] == [0, 8 * 44, 12 * 44]
    assert re.findall(r"^\| (\d+) \| `(\w+)` \| (\w+) \| (\S+) \|$", text, re.MULTILINE) == [
        ("0", "host_row", "int64", "-1"),
        ("8", "hot_row", "int32", "-1"),
        ("12", "column", "uint32", "`0xFFFFFFFF`"),
    ]
    assert "invalid" not in made.layout("decode")


def test_every_command_is_shown(made: types.ModuleType) -> None:
    text = made.commands()
    shown = re.findall(r"^## (.+)$", text, re.MULTILINE)
    groups = ["hotplan", "hotplan demo", "hotplan replay", "hotplan inspect", "hotplan build", "hotplan cache"]
    assert shown == [*groups, *(f"hotplan cache {name}" for name in ("clear", "info", "prune")), "hotplan doctor"]
    assert text.count("Usage: ") == len(shown)
    assert "--hot-sizes" in text


def test_the_times_inside_sglang_are_those_of_the_results(made: types.ModuleType) -> None:
    page = (DOCS / "sglang.md").read_text()
    shown = re.search(r"<!-- table: inside SGLang -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert shown
    assert shown[1] == made.inside_sglang()
    functions = {target.split(".")[-1] for family in sglang._TARGETS.values() for target in family}
    named = {row.split(" | ")[0].removeprefix("| ").split(".")[-1] for row in shown[1].splitlines()[2:]}
    assert functions <= named


def test_every_result_file_is_shown(made: types.ModuleType, tmp_path: Path) -> None:
    text = made.results()
    files = sorted(path.name for path in (ROOT / "benchmark" / "results").glob("*.jsonl"))
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == files
    assert files
    (tmp_path / "new.jsonl").write_text('{"kind": "meta", "benchmark": "new"}\n')
    with pytest.raises(ValueError, match=r"new\.jsonl: no rows"):
        made.results(tmp_path)
    with pytest.raises(FileNotFoundError):
        made.results(tmp_path / "none")
