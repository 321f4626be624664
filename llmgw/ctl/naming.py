"""Groups of commands: in the order in which they were added, and `node NAME`."""

from __future__ import annotations

import click
import click.shell_completion


class OrderedGroup(click.Group):
    """Lists its commands as they were added, not by the alphabet: what is asked most comes first."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


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
