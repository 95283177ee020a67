"""The ``hotplan`` command group.

Nothing here imports torch, so that ``hotplan --help`` answers at once. A subcommand's module is imported when it is
asked for; if that fails, only that subcommand is affected.
"""

from __future__ import annotations

import importlib

import click

# name -> (module, attribute, line in `hotplan --help`)
COMMANDS = {
    "demo": ("hotplan.cli.demo", "demo", "Serve a small generated trace, check every plan, show one."),
    "replay": ("hotplan.cli.replay", "replay", "Serve a recorded trace and build the real plans of every step."),
    "inspect": ("hotplan.cli.inspect", "inspect", "Print a saved plan tensor as a table."),
    "build": ("hotplan.cli.build", "build", "Compile all modules ahead of time, also without a GPU."),
    "cache": ("hotplan.cli.cache", "cache", "Compiled modules: list them, prune old ones, clear."),
    "doctor": ("hotplan.cli.doctor", "doctor", "Versions, compilers, cache, GPU, and what would go wrong."),
}


def _broken(name: str, error: ImportError) -> click.Command:
    """Stands in for a subcommand whose module cannot be imported, and says so when it is run."""

    @click.command(name, context_settings={"ignore_unknown_options": True}, add_help_option=False)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def command(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(f"'hotplan {name}' cannot run: {error}")

    return command


class LazyGroup(click.Group):
    """A group whose subcommands are listed by name and loaded one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            return _broken(cmd_name, error)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


def _print_version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from hotplan.version import __version__

        click.echo(f"hotplan {__version__}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print it.")
def main() -> None:
    """Planning kernels of sparse-attention serving: compress plans on CPU and CUDA."""
