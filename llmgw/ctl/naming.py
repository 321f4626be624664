"""Names on the command line: groups of commands, `node NAME`, and names that become a part of an address."""

from __future__ import annotations

from urllib.parse import quote

import click
import click.shell_completion

from llmgw.commands import Group


def segment(name: str, *, slashes: bool = False) -> str:
    """A name as one step of an address; models, replicas and logs may have `slashes` in theirs.

    Raises BadParameter for what no name can be, such as the nothing of a variable that was not set: it would lead to
    another address.
    """
    if name in ("", ".", "..") or ("/" in name and not slashes):
        raise click.BadParameter(f"{name!r} cannot be a name")
    return quote(name, safe="")


class OrderedGroup(Group):
    """Lists its commands as they were added, not by the alphabet: what is asked most comes first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class Ctl(OrderedGroup):
    """`llmgw ctl`: its own options say which plane is meant, and stand before the command."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            option = error.option_name
            if any(option in param.opts for param in self.params):
                words = f"{option} stands before the command: {ctx.command_path} {option} ..."
                raise click.NoSuchOption(option, words, ctx=error.ctx) from None
            raise


class NodeGroup(OrderedGroup):
    """`node NAME` shows a node, `node revoke NAME` does something to it.

    A node that is called like one of these commands is shown by `node show NAME`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        """The commands, and the nodes that could stand in their place."""
        from llmgw.ctl.complete import node_names

        names = node_names(ctx, self.commands["show"].params[0], incomplete)
        return [*super().shell_complete(ctx, incomplete), *map(click.shell_completion.CompletionItem, names)]
