"""Options in groups, for commands with many of them.

``grouped("Output")`` is ``click.option`` for the group ``Output``; a ``GroupedCommand`` shows the
groups in its help in the order of their first options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import click

_REST: Final = "Other"


class GroupedOption(click.Option):
    """An option with the name of its group."""

    def __init__(self, *arguments: Any, group: str, **settings: Any) -> None:
        """Make the option; see ``click.Option`` for the arguments."""
        super().__init__(*arguments, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command that shows its options in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(option, "group", _REST), []).append(record)
        rest = groups.pop(_REST, None)
        for name, records in (groups | ({_REST: rest} if rest else {})).items():
            with formatter.section(name):
                formatter.write_dl(records)


def grouped(group: str) -> Callable[..., Callable[[Any], Any]]:
    """Return ``click.option`` for the options of a group."""
    return partial(click.option, cls=GroupedOption, group=group)
