"""The options that the benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

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
