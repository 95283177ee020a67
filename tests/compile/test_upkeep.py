"""`hotplan cache`: what is listed, what counts as usable, and what prune and clear take and leave."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi
from click.testing import CliRunner, Result
from compile_support import HEADER, CountingCompiler, Family

import hotplan.jit
from hotplan.cli.main import main
from hotplan.jit import cache, key, upkeep
from hotplan.jit.toolchain import Memo

_fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def the_fake_family_alone(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "source_root", lambda: family.root)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, ["cache", *map(str, arguments)])
    assert "Traceback" not in result.output
    return result


def build() -> Path:
    """The entry of the sources as they are."""
    return hotplan.jit.build("fake", "cpu").path.parent


def build_other(family: Family, text: str = "inline int value() { return 7; }\n") -> Path:
    """An entry of other sources, which are then as before."""
    before = (family.root / HEADER).read_text()
    family.write(HEADER, text)
    entry = build()
    family.write(HEADER, before)
    return entry


def change(entry: Path, **changes: Any) -> None:
    manifest = json.loads((entry / "manifest.json").read_text())
    parts = changes.pop("parts", {})
    (entry / "manifest.json").write_text(json.dumps({**manifest, **changes, "parts": {**manifest["parts"], **parts}}))


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")} - {"compilers.json"}


def test_an_empty_cache(cache_dir: Path) -> None:
    assert run("info").output == f"{cache_dir}: 0 entries, 0.0 MB\n"
    for command in ("prune", "clear"):
        assert run(command).output == f"{cache_dir}: freed 0.0 MB\n"
    assert not cache_dir.exists()


def test_info(family: Family, cache_dir: Path) -> None:
    good, other, broken = build(), build_other(family), build_other(family, "inline int value() { return 8; }\n")
    os.truncate(broken / "hotplan_fake_cpu.so", 10)
    change(good, built=int(time.time()) - 3 * 86400)
    (listed,) = json.loads(run("info", "--json").output)
    assert (listed["directory"], listed["prebuilt"]) == (str(cache_dir), False)
    found = {Path(entry["path"]): entry for entry in listed["entries"]}
    assert {path: entry["usable"] for path, entry in found.items()} == {good: True, other: False, broken: False}
    assert found[other]["why_not"] == "other sources"
    assert found[broken]["why_not"] == "damaged: hotplan_fake_cpu.so is not what was built"
    assert found[good]["days"] == pytest.approx(3, abs=0.1)
    assert found[good]["version"] == hotplan.__version__
    assert found[good]["bytes"] == sum(file.stat().st_size for file in good.iterdir())
    assert listed["bytes"] == sum(entry["bytes"] for entry in found.values())
    text = run("info").output
    assert f"{cache_dir}: 3 entries" in text
    for words in (good.name, other.name, "yes", "no: other sources", "no: damaged", "3.0"):
        assert words in text


def test_usable_is_what_load_would_take(compiler: CountingCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = build()
    compiler.set("[ $1 != --version ] || { echo another compiler; exit; }")
    (listed,) = upkeep.survey(entry.parent)
    assert (listed.why_not, listed.outdated) == ("other compilers", False)
    (shipped,) = upkeep.survey(entry.parent, shipped=True)
    assert shipped.why_not == ""
    monkeypatch.setattr(tvm_ffi, "__version__", "0.1.99")
    (listed,) = upkeep.survey(entry.parent, shipped=True)
    assert listed.outdated
    assert listed.why_not.startswith("tvm_ffi is ")
    assert listed.why_not.endswith(", not 0.1.99")


def test_info_shows_prebuilt_directories(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()
    shutil.move(cache_dir, tmp_path / "shipped")
    monkeypatch.setenv("HOTPLAN_PREBUILT_DIR", str(tmp_path / "shipped"))
    mine, shipped = json.loads(run("info", "--json").output)
    assert (mine["entries"], shipped["prebuilt"], len(shipped["entries"])) == ([], True, 1)
    assert f"{tmp_path / 'shipped'} (prebuilt): 1 entries" in run("info").output
    (alone,) = json.loads(run("info", "--json", "--dir", tmp_path / "shipped").output)
    assert alone["directory"] == str(tmp_path / "shipped")


def test_prune_takes_other_versions_and_what_is_damaged(family: Family, cache_dir: Path) -> None:
    good, other, broken = build(), build_other(family), build_other(family, "inline int value() { return 8; }\n")
    (broken / "manifest.json").unlink()
    gone = shutil.copytree(good, cache_dir / f"gone-cuda-{'0' * 16}")  # a family that there is no more
    change(gone, parts={"family": "gone", "backend": "cuda", "archs": ["9.0a"]})
    elsewhere = shutil.copytree(good, cache_dir / f"fake-cpu-{'1' * 16}")
    change(elsewhere, parts={"machine": "riscv64", "compilers": {"cxx": "another"}})
    result = run("prune", "--dry-run")
    assert result.exit_code == 0
    assert len(names(cache_dir)) == 5
    for entry in (other, broken, gone):
        assert f"would remove {entry.name}\n" in result.output
    assert "would free" in result.output
    result = run("prune")
    assert f"removed {other.name}\n" in result.output
    assert names(cache_dir) == {good.name, elsewhere.name}
    assert not list(cache_dir.glob(".build-*"))
    assert hotplan.jit.build("fake", "cpu").seconds == 0.0


def test_prune_by_age(family: Family, cache_dir: Path) -> None:
    entry = build()
    change(entry, built=int(time.time()) - 10 * 86400)
    log = cache_dir / f"fake-cpu-{'2' * 16}.log"
    log.write_text("of a compile that failed")
    for options in ([], ["--days", 11], ["--days", 0.5]):
        run("prune", *options)
        assert names(cache_dir) == {entry.name, log.name} - ({entry.name} if options == ["--days", 0.5] else set())
    os.utime(log, (0, 0))
    run("prune", "--days", 0.5)
    assert names(cache_dir) == set()
    assert run("prune", "--days", -1).exit_code == 2


def test_clear_takes_all_and_nothing_else(family: Family, cache_dir: Path) -> None:
    for entry in (build(), build_other(family)):
        assert entry.is_dir()
    (cache_dir / f"fake-cpu-{'3' * 16}.log").write_text("log")
    for name in ("mine.txt", "fake-cpu-short/file", f"fake-rocm-{'4' * 16}/file"):
        (cache_dir / name).parent.mkdir(exist_ok=True)
        (cache_dir / name).write_text("somebody's")
    assert len(run("clear", "--dry-run").output.splitlines()) == 4
    assert run("clear").exit_code == 0
    assert names(cache_dir) == {"mine.txt", "fake-cpu-short", f"fake-rocm-{'4' * 16}"}


def test_what_another_process_builds_stays(family: Family, cache_dir: Path) -> None:
    entry = build()
    recipe = key.make_recipe("fake", "cpu", Memo(None))
    ready, go = _fork.Event(), _fork.Event()

    def hold() -> None:
        with cache.building(cache_dir, recipe) as staging:
            (staging / "half").touch()
            ready.set()
            go.wait(30)

    holder = _fork.Process(target=hold, daemon=True)
    holder.start()
    ready.wait()
    result = run("clear")
    assert (result.exit_code, result.stdout) == (0, f"{cache_dir}: freed 0.0 MB\n")
    assert result.stderr == "kept fake-cpu: another process is building it\n"
    assert entry.is_dir()
    assert len(list(cache_dir.glob(".build-*/half"))) == 1
    go.set()
    holder.join()
    assert f"removed {entry.name}" in run("clear").output
    assert names(cache_dir) == set()


def test_a_loaded_module_goes_on_working(cache_dir: Path) -> None:
    module = hotplan.jit.load("fake", "cpu")
    run("clear")
    assert names(cache_dir) == set()
    assert module.answer() == 42


def test_the_index_of_a_shipped_directory_follows(family: Family, cache_dir: Path) -> None:
    good, other = build(), build_other(family)
    cache.write_index(cache_dir)
    run("prune")
    index = json.loads((cache_dir / "manifest.json").read_text())
    assert [module["entry"] for module in index["modules"]] == [good.name]
    assert other.name not in names(cache_dir)


def test_a_directory_that_others_can_write_is_refused(cache_dir: Path) -> None:
    build()
    cache_dir.chmod(0o777)
    for command in ("info", "prune", "clear"):
        result = run(command)
        assert result.exit_code == 1
        assert f"{cache_dir} can be written by other users" in result.output
