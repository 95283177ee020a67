"""The wheel and the sdist: all that an installation needs is in them, and nothing else."""

from __future__ import annotations

import contextlib
import email
import importlib.metadata
import re
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import hotplan

ROOT = Path(__file__).resolve().parents[2]

hatchling = pytest.importorskip("hatchling.build", reason="needs hatchling, the build backend")


def build_wheel(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> zipfile.ZipFile:
    out.mkdir()
    monkeypatch.chdir(source)
    return zipfile.ZipFile(out / hatchling.build_wheel(str(out)))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return build_wheel(ROOT, tmp_path_factory.mktemp("dist") / "wheel", monkeypatch)


def files(directory: Path, *suffixes: str) -> set[str]:
    """Files of these kinds below `directory`, as paths relative to it."""
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.suffix in suffixes}


def pages() -> set[str]:
    """What the documentation is made of; docs/_build is where somebody may have built it."""
    found = {f"docs/{name}" for name in files(ROOT / "docs", ".md", ".py")}
    return {name for name in found if not name.startswith("docs/_build/")}


def test_the_wheel_holds_python_headers_sources_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    info = f"hotplan-{hotplan.__version__}.dist-info"
    expected = {f"hotplan/{name}" for name in files(ROOT / "python/hotplan", ".py")}
    expected |= {f"hotplan/include/{name}" for name in files(ROOT / "include", ".h", ".cuh")}
    expected |= {f"hotplan/csrc/{name}" for name in files(ROOT / "csrc", ".h", ".cpp", ".cu")}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    expected |= {"hotplan/py.typed"}
    assert set(wheel.namelist()) == expected
    for name in ("hotplan/jit/loader.py", "hotplan/csrc/compress/launch.cu", "hotplan/include/sgl_kernel/tensor.h"):
        assert name in expected


def test_what_the_wheel_holds_is_what_is_here(wheel: zipfile.ZipFile) -> None:
    for name in wheel.namelist():
        path = PurePosixPath(name)
        if path.parts[0] == "hotplan":
            top = ROOT if path.parts[1] in ("include", "csrc") else ROOT / "python/hotplan"
            assert wheel.read(name) == top.joinpath(*path.parts[1:]).read_bytes(), name


def test_the_sdist_builds_the_same_wheel(
    wheel: zipfile.ZipFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    name = hatchling.build_sdist(str(tmp_path))
    with tarfile.open(tmp_path / name) as archive:
        names = [PurePosixPath(member.name) for member in archive.getmembers() if member.isfile()]
        archive.extractall(tmp_path)
    top = f"hotplan-{hotplan.__version__}"
    inside = [path.relative_to(top) for path in names]
    folders = {path.parts[0] for path in inside if len(path.parts) > 1}
    assert folders == {"benchmark", "csrc", "docs", "examples", "include", "python", "tests"}
    loose = {path.name for path in inside if len(path.parts) == 1}
    assert loose == {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
    assert {path.as_posix() for path in inside if path.parts[0] == "docs"} == pages()
    assert not [path for path in inside if path.suffix in (".pyc", ".so", ".o") or "__pycache__" in path.parts]
    again = build_wheel(tmp_path / top, tmp_path / "again", monkeypatch)
    assert {one.filename: one.CRC for one in again.infolist()} == {one.filename: one.CRC for one in wheel.infolist()}


def test_the_version_is_the_same_everywhere(wheel: zipfile.ZipFile) -> None:
    version = hotplan.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?", version)
    metadata = email.message_from_bytes(wheel.read(f"hotplan-{version}.dist-info/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("hotplan", version)
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == version
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from the checkout, not installed
        assert importlib.metadata.version("hotplan") == version


def test_the_commands_and_the_plugin_exist(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"hotplan-{hotplan.__version__}.dist-info/entry_points.txt").decode()
    targets = re.findall(r"^\w+ = ([\w.]+):(\w+)$", text, re.MULTILINE)
    assert targets == [("hotplan.cli.main", "main"), ("hotplan.integrations.sglang", "register")]
    for module, name in targets:
        path = "/".join(module.split(".")) + ".py"
        assert f"def {name}(" in wheel.read(path).decode()
