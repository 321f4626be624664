"""Weights on the nodes: what is there, some more of it, and less of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import model_names, node_names, weights_names
from llmgw.ctl.running import done, output, pretty, run, show, watched

if TYPE_CHECKING:
    from llmgw.ctl.client import Plane

#: A node looks through its cache, removes, and the plane asks many of them.
_WITHIN = 180.0


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from llmgw.units import parse_size

        try:
            size = parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size < 1:
            self.fail("a rate of nothing fetches nothing", param, ctx)
        return size


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from llmgw.units import parse_duration

        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("node", default="", metavar="[NODE]", shell_complete=node_names)
@watched
def weights(node: str, output: str, watch: float | None) -> None:
    """What the nodes' caches of models hold: source, bytes, whole or not, in use or not."""
    from llmgw.ctl import weightsviews

    show("weights", weightsviews.caches, output=output, watch=watch, node=node)


@click.command()
@click.argument("source", shell_complete=model_names)
@click.argument("nodes", nargs=-1, metavar="[NODE...]", shell_complete=node_names)
@click.option(
    "--rate", type=_Size(), metavar="SIZE", help="Bytes per second, such as 50MB; a shard that waits lifts it."
)
@click.option("--refresh", is_flag=True, help="Where SOURCE is a branch that has moved on, what it is now.")
@output
def fetch(source: str, nodes: tuple[str, ...], rate: int | None, refresh: bool, output: str) -> None:
    """Let nodes fetch weights before they are needed; without NODE all that are connected.

    SOURCE is written as in models.toml: hf://org/model, or https://HOST/FILE#sha256=DIGEST; or it is a model's name.
    """
    order = {"source": source, "nodes": nodes, "bytes_per_second": rate, "refresh": refresh}
    done("weights/fetch", order, output=output)


@click.command()
@click.argument("nodes", nargs=-1, metavar="[NODE...]", shell_complete=node_names)
@click.option("--yes", is_flag=True, help="Remove it. Without this only the plan is shown.")
@click.option("--dry-run", is_flag=True, help="Show the plan only, which is the default.")
@click.option("--grace", type=_Duration(), default="1h", metavar="DURATION", help="Keep what was used since. [1h]")
@click.option(
    "--source", "sources", multiple=True, metavar="SOURCE", shell_complete=weights_names,
    help="Only this source; may be given again.",
)  # fmt: skip
@output
def gc(nodes: tuple[str, ...], yes: bool, dry_run: bool, grace: float, sources: tuple[str, ...], output: str) -> None:
    """Remove weights that no wanted model names, on NODE or on all nodes.

    Each node checks again, file by file, and says what it kept and why. Exit status 6 when a node could not be asked.
    """
    if yes and dry_run:
        raise click.UsageError("--yes removes and --dry-run does not: give one of them")
    order = {"nodes": nodes, "sources": sources, "grace": grace, "dry_run": not yes}

    async def act(plane: Plane) -> int:
        from llmgw.ctl import weightsviews
        from llmgw.ctl.show import console
        from llmgw.wire.weightsapi import RemovalReply

        answer = await plane.post("weights/gc", order, within=_WITHIN)
        reply = answer.read(RemovalReply)
        if output == "json":
            pretty(answer.data)
        else:
            out = console()
            out.print(weightsviews.removals(reply, out.width, sources), soft_wrap=not out.is_terminal)
        return 6 if any(node.error for node in reply.nodes) else 0

    run(act, output=output)


COMMANDS = (weights, fetch, gc)
