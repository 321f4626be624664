"""What would happen: a change is thought through by the plane, and nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import click

from llmgw.ctl.complete import node_names, node_or_fabric_names
from llmgw.ctl.fleet import spoken
from llmgw.ctl.naming import OrderedGroup
from llmgw.ctl.running import output, pretty, run

if TYPE_CHECKING:
    from llmgw.ctl.client import Plane

#: A large fleet that changes one replica at a time is followed for a while.
_WITHIN = 120.0


@click.group("what-if", cls=OrderedGroup)
def what_if() -> None:
    """What a change would do: which replicas move, start and stop, who ends up short. Nothing is changed.

    Followed by the plane's own rules, with nodes that do what they are told; that an engine fails is not foreseen.
    """


@what_if.command()
@click.argument("node", shell_complete=node_names)
@click.option("--within", metavar="TIME", help="How long what leaves may finish its requests (10m); else as the plane.")
@output
def drain(node: str, within: str | None, output: str) -> None:
    """If NODE were drained."""
    from llmgw.units import parse_duration

    try:
        seconds = parse_duration(within) if within else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--within") from None
    _ask({"kind": "drain", "name": node, "within": seconds}, output)


@what_if.command()
@click.argument("name", metavar="NODE|FABRIC", shell_complete=node_or_fabric_names)
@output
def lose(name: str, output: str) -> None:
    """If a node, or every port of a fabric, were gone.

    FABRIC is a name that `llmgw ctl fabrics` shows, or the label of its ports.
    """
    _ask({"kind": "lose", "name": name}, output)


@what_if.command()
@click.argument("path", metavar="FILE", required=False, type=click.Path())
@click.option(
    "-f",
    "--file",
    "other",
    metavar="FILE",
    type=click.Path(),
    help='models.toml, as for `apply`; "-" is standard input.',
)
@output
def apply(path: str | None, other: str | None, output: str) -> None:
    """If the models of FILE were applied."""
    import sys
    from pathlib import Path

    from llmgw.errors import BadInput
    from llmgw.files import read_whole

    if (path is None) is (other is None):
        raise click.UsageError("give one FILE")
    name = path or other or ""

    def text() -> str:
        data = sys.stdin.buffer.read() if name == "-" else read_whole(Path(name))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{name} is not UTF-8 text (byte {error.start})") from None

    async def act(plane: Plane) -> None:
        await _answered(plane, {"kind": "apply", "name": spoken(name), "models": text()}, output)

    run(act, output=output)


def _ask(order: Mapping[str, object], output: str) -> NoReturn:
    async def act(plane: Plane) -> None:
        await _answered(plane, order, output)

    run(act, output=output)


async def _answered(plane: Plane, order: Mapping[str, object], output: str) -> None:
    answer = await plane.post("what-if", order, within=_WITHIN)
    if output == "json":
        pretty(answer.data)
    else:
        from llmgw.ctl import whatifviews
        from llmgw.ctl.show import console
        from llmgw.wire.whatifapi import WhatIfReply

        out = console()
        out.print(whatifviews.whatif(answer.read(WhatIfReply), out.width), soft_wrap=not out.is_terminal)


COMMANDS = (what_if,)
