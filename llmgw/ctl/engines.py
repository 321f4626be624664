"""Engines on the nodes: there, on their way, failed, wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import node_names
from llmgw.ctl.running import show, watched

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmgw.ctl.client import Answer
    from llmgw.ctl.show import Cell
    from llmgw.wire.enginesapi import NodeEnginesView


@click.command()
@click.argument("node", default="", metavar="[NODE]", shell_complete=node_names)
@watched
def engines(node: str, output: str, watch: float | None) -> None:
    """The engines on NODE or on all nodes: installed, being installed, failed and why.

    What an installer printed: `llmgw ctl logs NODE install:ENGINE-VERSION`.
    """
    show("engines", table, output=output, watch=watch, node=node)


def table(answer: Answer, width: int) -> RenderableType:
    """Every engine of every node in a line."""
    from llmgw.ctl.show import Column, columns
    from llmgw.wire.enginesapi import EnginesReply

    heads = (
        Column("NODE"),
        Column("ENGINE"),
        Column("VERSION"),
        Column("STATE"),
        Column("WANTED", extra=1),
        Column("DETAIL", extra=2, prose=True),
    )
    reply = answer.read(EnginesReply)
    rows = [row for node in reply.nodes for row in _rows(node)]
    silent = [node.node for node in reply.nodes if not node.engines and not node.connected]
    nothing = "no node has an engine, and none is wanted: see [engines]"
    if len(silent) == len(reply.nodes) == 1:
        nothing = f"{silent[0]} has said nothing of its engines since the plane started: it is not connected"
    return columns(heads, rows, nothing=nothing, width=width)


def _rows(node: NodeEnginesView) -> Iterator[tuple[Cell, ...]]:
    from llmgw.ctl.show import clean, word

    for found in node.engines:
        wanted = "preferred" if found.preferred else "yes" if found.wanted else ""
        yield node.node, clean(found.engine), clean(found.version), word(found.state), wanted, clean(found.detail)


COMMANDS = (engines,)
