"""``tq-onnx``: the command group.

Each command lives in its own file and is imported only when it runs, so that ``tq-onnx --help``
answers at once. stdout carries a command's result and nothing else; progress and errors go to
stderr. Exit codes are documented in ``tq_onnx/errors.py``; no traceback reaches a user unless
``TQ_ONNX_DEBUG=1`` asks for it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Final

import click

from tq_onnx.cli import terminal
from tq_onnx.cli.retired import refuse_retired
from tq_onnx.runtime.variables import VARIABLES
from tq_onnx.version import __version__

GROUPS: Final[dict[str, dict[str, str]]] = {
    "Start": {
        "demo": "Convert the bundled model and compare it with its conversion.",
        "inspect": "Show the attention layers of a model, or its conversion.",
        "fit": "Show the largest context that fits into memory.",
    },
    "Convert": {
        "convert": "Convert an exported decoder to a TurboQuant KV cache.",
        "calibrate": "Gather statistics of a model for convert --calibration.",
        "presets": "List the presets with their codecs and bytes per token.",
        "adopt": "Replace the operator library in a converted folder.",
        "olive-config": "Write the file with which Olive finds our pass.",
    },
    "Check": {
        "verify": "Compare a converted model with its original.",
        "report": "Measure how much quality conversions lose.",
        "bench": "Measure the speed before and after a conversion.",
        "diff": "Show what a conversion changed in the graph.",
    },
    "Run": {
        "generate": "Generate text with an original or a converted model.",
        "chat": "Chat with a model; the KV cache is kept between turns.",
        "serve": "Serve a converted folder to OpenAI's clients.",
    },
    "Installation": {
        "info": "Show versions, operator library, CPU and providers.",
    },
}
"""Commands in the order of the help; ``tq_onnx/cli/NAME.py`` holds a click command ``NAME``, with
an underscore for every hyphen."""

COMMANDS: Final[dict[str, str]] = {
    name: summary for commands in GROUPS.values() for name, summary in commands.items()
}


class Commands(click.Group):
    """A group whose commands are imported on use, inside the error boundary of ``terminal``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the file of one command."""
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        module = importlib.import_module(f"tq_onnx.cli.{name}")
        command = getattr(module, name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module.__name__}.{name} is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        width = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{name:{width}}", text) for name, text in commands.items()])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help, and end as for bad usage, where there are no arguments."""
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or name the ones that are spelled alike."""
        refuse_retired(args[0])
        close = get_close_matches(args[0], COMMANDS) if args[0] not in COMMANDS else []
        if close:
            ctx.fail(f"No such command {args[0]!r}, did you mean {' or '.join(close)}?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command inside ``errors_of_command``; refuse words of earlier versions."""
        with terminal.errors_of_command():
            try:
                return super().invoke(ctx)
            except click.NoSuchOption as error:
                refuse_retired(error.option_name)
                raise

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Parse the arguments, run the command and exit with its code."""

        def run() -> Any:
            return super(Commands, self).main(
                args, prog_name or "tq-onnx", complete_var, standalone_mode=False, **extra
            )

        if not standalone_mode:
            return run()
        sys.exit(terminal.exit_code_of(run))


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`tq-onnx COMMAND --help` shows the options of a command. Environment variables "
    f"(docs/commands.md): {', '.join(variable.name for variable in VARIABLES)}.",
)
@click.version_option(__version__, "-V", "--version", prog_name="tq-onnx")
def main() -> None:
    """Convert ONNX language models to a 4-bit TurboQuant KV cache.

    \b
    Example:
      tq-onnx convert model.onnx
      tq-onnx verify model.onnx model.int4.onnx
      tq-onnx generate model.int4.onnx --prompt "The whale"
    """


if __name__ == "__main__":
    main()
