"""The ``hotplan`` command, through click's runner."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

import hotplan
from hotplan import reference
from hotplan.cli import main as cli
from hotplan.plans import PrefillPlan
from hotplan.replay import device as replay_device
from hotplan.replay.steps import PlanBuilder
from hotplan.replay.trace import generate_trace, write_trace


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.jsonl"
    write_trace(path, generate_trace(14, seed=5, max_input=5000, mean_output=24))
    return path


# -- the group ---------------------------------------------------------------------------------------------------------


def test_help_lists_every_command_without_torch() -> None:
    program = (
        "import sys; from hotplan.cli.main import main; main(['--help'], standalone_mode=False);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'rich', 'tvm_ffi')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"\n  {name} " in done.stdout


def test_version() -> None:
    assert run("--version").output == f"hotplan {hotplan.__version__}\n"


def test_an_unknown_command_is_refused() -> None:
    result = run("frobnicate")
    assert result.exit_code == 2
    assert "No such command 'frobnicate'" in result.output


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "doctor"])
def test_every_command_has_help(name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {name}")


def test_a_command_that_cannot_be_imported_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "broken", ("hotplan.cli.no_such_module", "broken", "Broken."))
    result = run("broken", "--some", "option", "--help")
    assert result.exit_code == 1
    assert "'hotplan broken' cannot run: No module named 'hotplan.cli.no_such_module'" in result.output
    assert run("--help").exit_code == 0
    assert run("replay", "--help").exit_code == 0


# -- demo and replay ---------------------------------------------------------------------------------------------------


def test_demo_checks_shows_a_plan_and_ends_in_the_table() -> None:
    result = run("demo", "--requests", 6, "--device", "cpu", "--rows", 4)
    assert result.exit_code == 0, result.output
    assert "backend: cpu (asked for)" in result.output
    excerpt, table = result.output.index("compress plan: "), result.output.index("Plans by kind of step")
    assert excerpt < table
    for text in ("read_page_1", "decode plan: ", "6 of 6 finished", "plans equal the reference's"):
        assert text in result.output


def test_demo_with_drafts() -> None:
    result = run("demo", "--requests", 4, "--device", "cpu", "--spec", 3, "--rows", 2)
    assert result.exit_code == 0, result.output
    assert "(verify, " in result.output
    assert "rejected drafts" in result.output


def test_the_chosen_device_comes_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def load(family: str, backend: str) -> None:
        loaded.append(backend)
        if backend == "cuda":
            raise RuntimeError("no nvcc\nhere is a long story")

    monkeypatch.setattr(replay_device.jit, "load", load)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert replay_device.choose_device("auto") == ("cpu", "this torch is built without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert replay_device.choose_device("auto") == ("cpu", "torch sees no CUDA device")
    with pytest.raises(ValueError, match="device: expected one of 0 CUDA devices that torch sees, got cuda:1"):
        replay_device.choose_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: None)
    assert replay_device.choose_device("auto") == ("cpu", "the GPU cannot be used: no nvcc")
    with pytest.raises(RuntimeError, match="no nvcc"):
        replay_device.choose_device("cuda")  # what was asked for is not replaced
    monkeypatch.setattr(replay_device.jit, "load", lambda family, backend: loaded.append(backend))
    assert replay_device.choose_device("auto") == ("cuda:0", "torch sees GPU 0")
    assert replay_device.choose_device("cuda:1") == ("cuda:1", "asked for, GPU 1")
    assert loaded == ["cpu", "cpu", "cuda", "cpu", "cuda", "cuda", "cuda"]


def test_replay_with_check_json_and_plot(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summary, picture = tmp_path / "out.json", tmp_path / "out.png"
    result = run("replay", trace, "--check", "--device", "cpu", "--limit", 9, "--json", summary, "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "9 of 9 finished" in result.output
    written = json.loads(summary.read_text())
    assert written["trace"] == "small.jsonl"
    assert written["finished"] == written["requests"] == 9
    assert set(written["kinds"]) == {"prefill", "decode"}
    assert (
        written["checked_plans"] == 4 * written["kinds"]["prefill"]["steps"] + 2 * written["kinds"]["decode"]["steps"]
    )
    for kind in written["kinds"].values():
        assert 0 < kind["build_us"]["p50"] <= kind["build_us"]["p99"] <= kind["build_us"]["max"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (["--spec", 3, "--accept-rate", 0.5, "--seed", 7], {"prefill", "verify"}),
        (["--spec", 9, "--mixed", "--budget", 700], {"verify", "mixed"}),
        (["--mixed", "--budget", 512, "--no-pad-decode", "--page-size", 128], {"decode", "mixed"}),
        (["--no-prefix-cache", "--req-ring", "--window", 1000], {"prefill", "decode"}),
        (["--slots", 8192, "--swa-slots", 8192, "--budget", 2048, "--max-running", 3], {"prefill", "decode"}),
    ],
)
def test_replay_options_reach_the_server(trace: Path, tmp_path: Path, options: list[object], kinds: set[str]) -> None:
    result = run("replay", trace, "--check", "--device", "cpu", "--json", tmp_path / "out.json", *options)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert kinds <= set(written["kinds"])
    assert written["finished"] == 14


def test_replay_without_check_says_so(trace: Path) -> None:
    result = run("replay", trace, "--limit", 2, "--device", "cpu")
    assert result.exit_code == 0
    assert "off (--check)" in result.output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--device", "tpu"], 2, "expected auto, cpu, cuda or cuda:N, got 'tpu'"),
        (["--limit", 0], 2, "0 is not in the range x>=1"),
        (["--spec", 10], 1, "draft_tokens: expected 0..9, got 10"),
        (["--budget", 65537], 1, "token_budget: expected 1..65536, got 65537"),
        (["--slots", 512], 1, "slots: expected at least"),
        (["--req-ring"], 1, "req_ring: expected prefix_cache off, got on"),
        (["--plot", "out.jpg"], 2, "--plot: expected a file name ending in .png, .pdf, .svg, got out.jpg"),
        (["--json", "/no/such/place/out.json"], 2, "--json: there is no directory /no/such/place"),
    ],
)
def test_bad_options_are_one_line_errors(trace: Path, options: list[object], code: int, message: str) -> None:
    result = run("replay", trace, *options)
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_bad_trace_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 0}\n')
    result = run("replay", path)
    assert result.exit_code == 1
    assert f"Error: {path}:2: missing input_length, output_length, hash_ids" in result.output
    assert run("replay", tmp_path / "none.jsonl").exit_code == 2


def test_a_wrong_plan_ends_the_replay(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        plans = reference.plan_step_decode(*args, **kwargs)
        plans[4][0, 0] ^= 1
        return plans

    monkeypatch.setattr(hotplan, "plan_step_decode", wrong)
    result = run("replay", trace, "--check", "--device", "cpu")
    assert result.exit_code == 1
    assert "c4 decode plan differs from the reference: 1 of" in result.output
    assert run("replay", trace, "--device", "cpu").exit_code == 0  # nobody looks


def test_a_missing_matplotlib_is_said_before_the_run(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def no_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    result = run("replay", trace, "--plot", "out.png")
    assert result.exit_code == 2
    assert "--plot: plots need matplotlib: pip install matplotlib" in result.output


@pytest.mark.parametrize("command", ["replay", "demo"])
def test_ctrl_c_prints_the_summary_so_far(trace: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    build = PlanBuilder.build

    def interrupted(self: PlanBuilder, step: Any) -> Any:
        if step.index == 5:
            raise KeyboardInterrupt
        return build(self, step)

    monkeypatch.setattr(PlanBuilder, "build", interrupted)
    result = run(command, *([trace] if command == "replay" else []), "--device", "cpu")
    assert result.exit_code == 130
    assert "finished (interrupted)" in result.output
    assert "Plans by kind of step" in result.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [[], ["--spec", 3], ["--mixed", "--budget", 700]])
def test_replay_on_the_gpu(trace: Path, options: list[object]) -> None:
    result = run("replay", trace, "--check", "--device", "cuda", *options)
    assert result.exit_code == 0, result.output
    assert "backend: cuda:0 (asked for" in result.output
    assert "14 of 14 finished" in result.output


# -- inspect -----------------------------------------------------------------------------------------------------------

TEN = torch.tensor([10])
TABLES = (torch.arange(64, dtype=torch.int32)[None], torch.arange(64))


def plans() -> tuple[dict[int, PrefillPlan], dict[int, torch.Tensor]]:
    """Worked value 1 of the contract, and the decode plan of the same request."""
    rid = torch.tensor([0])
    prefill = reference.plan_step_prefill(rid, *TABLES, TEN, TEN, num_q_tokens=10, swa_page_size=256)
    return prefill, reference.plan_step_decode(
        rid, *TABLES, TEN, swa_page_size=256, ratios=(4, 128), ring_sizes=(8, 128)
    )


def rows_of(output: str) -> list[list[str]]:
    """The data rows of all tables in an output, without the row number."""
    return [line.split()[1:] for line in output.splitlines() if line.split() and line.split()[0].isdigit()]


C4_COMPRESS = [["4", "3", "4", "0", "0"], ["8", "7", "0", "-1", "0"]]
C4_WRITE = [["4", "4"], ["5", "5"], ["6", "6"], ["7", "7"], ["8", "0"], ["9", "1"]]
C4_DECODE = [["10", "1", "1", "0"]]


def test_inspect_guesses_the_kind_from_the_shape(tmp_path: Path) -> None:
    prefill, decode = plans()
    file = tmp_path / "plan.pt"
    torch.save(prefill[4].write, file)
    result = run("inspect", file)
    assert result.output.startswith("plan.pt: write plan: 6 rows, 6 valid, 0 invalid\n")
    assert rows_of(result.output) == C4_WRITE

    torch.save(prefill[4].compress, file)
    result = run("inspect", file)
    assert result.output.startswith("plan.pt: compress plan: 2 rows")
    assert rows_of(result.output) == C4_COMPRESS
    assert "--kind decode" in result.output

    torch.save(decode[4], file)
    result = run("inspect", file, "--kind", "decode")
    assert result.output.startswith("plan.pt: decode plan: 1 rows")
    assert "--kind" not in result.output
    assert rows_of(result.output) == C4_DECODE


def test_inspect_reads_containers(tmp_path: Path) -> None:
    prefill, decode = plans()
    file = tmp_path / "plan.pt"
    torch.save(prefill[4], file)
    assert rows_of(run("inspect", file).output) == C4_COMPRESS + C4_WRITE

    torch.save(prefill, file)  # what plan_step_prefill returns
    output = run("inspect", file).output
    assert "[4]: compress plan" in output
    assert "[128]: compress plan" in output

    torch.save(decode, file)  # what plan_step_decode returns
    output = run("inspect", file).output
    assert "[4]: decode plan: 1 rows" in output
    assert rows_of(output)[0] == C4_DECODE[0]

    torch.save({"decode": decode[4], "rest": [prefill[4].write, tuple(prefill[128])]}, file)
    output = run("inspect", file).output
    for title in ("['decode']: decode plan", "['rest'][0]: write plan", "['rest'][1][0]: compress plan"):
        assert title in output


def test_inspect_reads_numpy_files(tmp_path: Path) -> None:
    prefill, decode = plans()
    np.save(tmp_path / "write.npy", prefill[4].write.numpy())
    assert rows_of(run("inspect", tmp_path / "write.npy").output) == C4_WRITE
    np.save(tmp_path / "rows.npy", hotplan.plans.decode_rows(decode[4]))
    assert rows_of(run("inspect", tmp_path / "rows.npy").output) == C4_DECODE
    np.savez(tmp_path / "both.npz", compress=prefill[4].compress.numpy(), write=prefill[4].write.numpy())
    output = run("inspect", tmp_path / "both.npz").output
    assert "['compress']: compress plan" in output
    assert rows_of(output) == C4_COMPRESS + C4_WRITE


def test_inspect_limits_rows(tmp_path: Path) -> None:
    torch.save(torch.full((100, 8), 255, dtype=torch.uint8), tmp_path / "plan.pt")
    output = run("inspect", tmp_path / "plan.pt", "--limit", 4).output
    assert "100 rows, 0 valid, 100 invalid" in output
    assert rows_of(output) == [["invalid"]] * 4
    assert "96 more rows" in output


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("ran",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(3, 8), "expected contiguous uint8 [n, 8], got dtype torch.float32"),
        (torch.zeros(3, 7, dtype=torch.uint8), "got shape [3, 7]"),
        (torch.zeros((), dtype=torch.uint8), "got shape []"),
        ({"a": 5}, "expected tensors in dictionaries, tuples or lists, got int at ['a']"),
        ([], "holds no tensors"),
        (Malicious(), "not a saved tensor or array"),
    ],
)
def test_inspect_refuses_what_is_no_plan(tmp_path: Path, value: object, message: str) -> None:
    torch.save(value, tmp_path / "plan.pt")
    result = run("inspect", tmp_path / "plan.pt")
    assert result.exit_code == 1
    assert message in result.output
    assert "ran" not in result.output.split()


@pytest.mark.parametrize("name", ["a.pt", "a.npy", "a.npz"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 nonsense"])
def test_inspect_refuses_files_that_are_something_else(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    result = run("inspect", tmp_path / name)
    assert result.exit_code == 1
    assert f"{tmp_path / name}: not a saved tensor or array" in result.output
    np.save(tmp_path / "objects.npy", np.array([object()], dtype=object), allow_pickle=True)
    assert run("inspect", tmp_path / "objects.npy").exit_code == 1
