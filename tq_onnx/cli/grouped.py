"""Options in groups, for commands with many of them.

``grouped("Output")`` is ``click.option`` for the group ``Output``. ``--help`` of a
``GroupedCommand`` shows the options with ``first=True``; ``--help-all`` shows all, group by group
in the order of their first options.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import click

_UNGROUPED: Final = "Other"
ALL: Final = "tq_onnx.all_options"
"""Key of a context's ``meta``: whether its help shows all options."""


class GroupedOption(click.Option):
    """An option with the name of its group."""

    def __init__(
        self,
        *arguments: Any,
        group: str = _UNGROUPED,
        first: bool = False,
        **settings: Any,
    ) -> None:
        """Make the option; see ``click.Option`` for the other arguments."""
        super().__init__(*arguments, **settings)
        self.group = group
        self.first = first


class GroupedCommand(click.Command):
    """A command that shows its options in groups."""

    def __init__(self, name: str, *, params: list[click.Parameter], **settings: Any) -> None:
        """Add ``--help-all``; see ``click.Command`` for the arguments."""
        show = GroupedOption(
            ["--help-all"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            first=True,
            callback=_show_all,
            help="Show all options and exit.",
        )
        super().__init__(name, params=[*params, show], **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each group, or one for the first options."""
        shows_all = ctx.meta.get(ALL, False)
        groups: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is None or not (shows_all or getattr(option, "first", True)):
                continue
            group = getattr(option, "group", _UNGROUPED) if shows_all else "Options"
            groups.setdefault(group, []).append(record)
        ungrouped = groups.pop(_UNGROUPED, None)
        for name, records in (groups | ({_UNGROUPED: ungrouped} if ungrouped else {})).items():
            with formatter.section(name):
                formatter.write_dl(records)


def _show_all(ctx: click.Context, _option: click.Parameter, is_set: bool) -> None:
    if is_set:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def grouped(group: str) -> Callable[..., Callable[[Any], Any]]:
    """Return ``click.option`` for the options of a group."""
    return partial(click.option, cls=GroupedOption, group=group)
