"""The options that the benchmarks share, and what they say about the device and the peer."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

import peers


def parser_for(description: str | None, sections: Iterable[str], default: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the common options; `default` are the sections that run where none are named."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sections",
        default=",".join(default),
        help=f"comma-separated, of: {','.join(sections)} (default %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="small cases, few repeats: a smoke test, not a result")
    parser.add_argument("--out", metavar="FILE", help="write JSON lines here (an existing file is replaced)")
    parser.add_argument(
        "--sglang",
        metavar="PATH",
        help=f"site-packages or unpacked wheel with SGLang in it; default ${peers.ENV_SGLANG}, then sys.path",
    )
    parser.add_argument("--no-peer", action="store_true", help="measure hotplan alone")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: host time of the CPU backend only"
    )
    parser.add_argument("--device-index", type=int, default=0, metavar="N")
    return parser


def chosen_sections(parser: argparse.ArgumentParser, text: str, known: Iterable[str]) -> list[str]:
    """The names in `text`; an unknown one ends the program with what was expected."""
    chosen = [name for name in text.split(",") if name]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"--sections: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    return chosen


def ready_device(options: argparse.Namespace) -> torch.device | None:
    """The device to measure on, made the current one; None, with a message, where there is no such GPU."""
    os.environ.pop("HOTPLAN_CHECK", None)  # the checked mode synchronises; it is not what is measured
    if options.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        print("no CUDA device; --device cpu times the CPU backend instead", file=sys.stderr)
        return None
    device = torch.device("cuda", options.device_index)
    torch.cuda.set_device(device)
    return device


def peer_root(options: argparse.Namespace) -> Path | None:
    """Where SGLang is, or None where its kernels are not wanted or, with a message, not to be had."""
    if options.no_peer or options.device == "cpu":
        return None
    root = peers.sglang_root(options.sglang)
    if root is None:
        print("no SGLang found (pip install --no-deps sglang, or --sglang PATH): no peer column", file=sys.stderr)
    return root
