"""Groups of commands whose help says of each command all that its first sentence says, in several lines if need be."""

from __future__ import annotations

import click


class Group(click.Group):
    """click's own cuts those sentences off at the width of a terminal."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, one.get_short_help_str(limit=1000)) for name, one in found if one is not None and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)
