"""The fuzzer's driver: runs cases in a process of their own, and reports what they find.

    python tests/fuzz/run.py --seconds 300 --seed fresh
    python tests/fuzz/run.py --seed 0 --only gather_compact --case 17    # that very case

Exit status 1 if there is a finding. README.md beside this file says what a finding is.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import runpy
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "unit")]

MOST_FINDINGS = 25
STALLED = 120.0
"""Seconds without a new case after which the process is taken for hanging."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so long (default: 60)")
    parser.add_argument("--cases", type=int, help="stop after so many cases instead")
    parser.add_argument("--seed", default="0", help='a number, or "fresh" for a new one')
    parser.add_argument("--only", metavar="OPERATOR", help="only this operator")
    parser.add_argument("--case", type=int, metavar="N", help="only this case of every operator")
    parser.add_argument("--sanitize", action="store_true", help="CPU modules with address and undefined sanitizers")
    parser.add_argument("--in-process", action="store_true", help="no process of its own, and a line per case (cuda)")
    parser.add_argument("--list", action="store_true", help="print the operators and stop")
    parser.add_argument("--show", action="store_true", help="print the cases' calls and run nothing")
    parser.add_argument("--prepare", type=Path, metavar="FILE", help="run this Python file first")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=float("inf"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.seed = secrets.randbelow(2**32) if options.seed == "fresh" else int(options.seed)
    if options.sanitize and options.device != "cpu":
        parser.error("--sanitize is about the CPU; on a GPU run the driver under compute-sanitizer")
    return options


def reproduction(options: argparse.Namespace, record: dict[str, Any]) -> str:
    words = ["python", "tests/fuzz/run.py", "--seed", str(options.seed), "--only", record["operator"]]
    words += ["--case", str(record["case"])]
    words += ["--device", options.device] if options.device != "cpu" else []
    words += ["--sanitize"] if options.sanitize else []
    words += ["--prepare", str(options.prepare)] if options.prepare else []
    return shlex.join(words)


def excerpt(text: str) -> str:
    """What a process said last: from a sanitizer's first line on, or the end."""
    begin = max(text.find("ERROR: AddressSanitizer"), text.find("runtime error:"))
    return text[begin:][:3000] if begin >= 0 else text[-3000:]


class Report:
    """Counts what came of cases, and prints findings, one of a kind."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.current: dict[str, Any] = {}
        self.outcomes: Counter[str] = Counter()
        self.found = 0
        self.done = False

    def take(self, record: dict[str, Any]) -> None:
        if "detail" in record:
            self.finding(record)
        elif "operator" in record:
            self.current = record
        else:
            self.done = True
            self.outcomes.update(record["outcomes"])

    def finding(self, record: dict[str, Any]) -> None:
        self.found += 1
        print(f"\nFINDING {self.found}: {record['operator']} {record['detail']}", flush=True)
        if record.get("call"):
            print(f"  call: {record['call']}"[:3000])
        print(f"  reproduce: {reproduction(self.options, record)}", flush=True)

    def finish(self, seconds: float) -> int:
        total = ", ".join(f"{count} {what}" for what, count in sorted(self.outcomes.items()))
        print(f"\nseed {self.options.seed}: {total or 'no case'} in {seconds:.0f} s; {self.found} findings", flush=True)
        return 1 if self.found else 0


def work(options: argparse.Namespace, pipe: TextIO) -> None:
    """The cases themselves, in this process."""
    from fuzz import sanitized_modules, worker

    guarded = sanitized_modules.load() if options.sanitize else None
    if options.prepare:
        runpy.run_path(str(options.prepare))
    worker.run(options, pipe, guarded)


def environment(options: argparse.Namespace) -> dict[str, str]:
    if not options.sanitize:
        return dict(os.environ)
    from fuzz import sanitized_modules

    return {**os.environ, **sanitized_modules.environment()}


def watch(options: argparse.Namespace, report: Report) -> None:
    """One worker process until it is done or dead. A crash or a stall is a finding of the case that was running."""
    passed = ["--seed", str(options.seed), "--device", options.device, "--until", str(options.until)]
    passed += ["--begin", str(options.begin)]
    for name in ("only", "case", "cases", "prepare"):
        if (value := getattr(options, name)) is not None:
            passed += [f"--{name}", str(value)]
    passed += ["--sanitize"] if options.sanitize else []
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *passed],
            stdout=subprocess.PIPE, stderr=words, text=True, env=environment(options),
        )  # fmt: skip
        stalled = threading.Event()
        timer: threading.Timer | None = None

        def stop() -> None:
            stalled.set()
            process.kill()

        assert process.stdout is not None
        before = report.found
        report.current = {}
        for line in process.stdout:
            if timer:
                timer.cancel()
            timer = threading.Timer(STALLED, stop)
            timer.start()
            report.take(json.loads(line))
            if report.found >= MOST_FINDINGS:
                process.kill()
        if timer:
            timer.cancel()
        status = process.wait()
        if report.done or report.found >= MOST_FINDINGS:
            return
        words.seek(0)
        tail = excerpt(words.read())
    if not report.current:
        raise SystemExit(f"the worker ended with status {status} before its first case:\n{tail}")
    if stalled.is_set():
        detail = f"ran for more than {STALLED:.0f} s"
    elif status < 0:
        detail = f"ended the process: {signal.Signals(-status).name}\n{tail}"
    else:
        detail = f"ended the process with status {status}\n{tail}"
    if report.found == before or report.current.get("index", -1) >= options.begin:
        report.finding({**report.current, "detail": detail})
    options.begin = report.current["index"] + 1


class _Lines:
    """The pipe of a run without a process of its own: cases as lines, findings to the report."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def write(self, line: str) -> None:
        record = json.loads(line)
        if "operator" in record and "detail" not in record:
            print(f"case {record['operator']} {record['case']}", flush=True)
        self.report.take(record)

    def flush(self) -> None:
        pass


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.worker:
        faulthandler.enable()
        pipe = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what operators print is no record
        work(options, pipe)
        return 0
    if options.list or options.show:
        from fuzz import operators, worker

        if options.list:
            print("\n".join(sorted(operators.REGISTRY)))
            return 0
        for _, operator, number in worker.cases(options.only, options.case, options.cases or 20, options.begin):
            print(number, worker.make_case(options.seed, operator, number, options.device)[0].describe())
        return 0
    begin = time.time()
    if options.cases is None and options.case is None:
        options.until = begin + options.seconds
    print(f"fuzzing on {options.device}, seed {options.seed}", flush=True)
    report = Report(options)
    if options.in_process:
        work(options, _Lines(report))  # type: ignore[arg-type]
    else:
        while not report.done and report.found < MOST_FINDINGS and time.time() < options.until:
            watch(options, report)
            if options.case is not None:
                break
    return report.finish(time.time() - begin)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
