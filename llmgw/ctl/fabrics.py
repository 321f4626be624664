"""The fabrics themselves: which there are, what a map shows, what changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import fabric_names, node_or_fabric_names
from llmgw.ctl.running import output, pretty, run, show, watched

if TYPE_CHECKING:
    from llmgw.ctl.client import Plane

#: A scan may take three minutes on the node, and its map is judged afterwards; twice, when a second node has to look.
_SCAN_WITHIN = 400.0
_ROUTE_WITHIN = 200.0


@click.command()
@watched
def fabrics(output: str, watch: float | None) -> None:
    """InfiniBand fabrics: managers, age of the map, faults."""
    from llmgw.ctl import fabricviews

    show("fabrics", fabricviews.fabrics, output=output, watch=watch)


@click.command()
@click.argument("name", metavar="[FABRIC]", default="", shell_complete=fabric_names)
@click.option("--all", "everything", is_flag=True, help="Every switch, not only leaves and those with faults.")
@click.option("--svg", is_flag=True, help="The drawing of the newest map instead, as SVG on standard output.")
@watched
def fabric(name: str, everything: bool, svg: bool, output: str, watch: float | None) -> None:
    """One fabric: managers, faults, switches, and the scans that are kept.

    FABRIC may be left out where there is only one.
    """
    from llmgw.ctl import fabricviews

    if svg:

        async def draw(plane: Plane) -> None:
            click.echo((await plane.get("fabric/map.svg", {"name": name}, within=60.0)).data)

        run(draw)
    table = fabricviews.whole_fabric if everything else fabricviews.fabric
    show("fabric", table, output=output, watch=watch, name=name)


@click.command("fabric-scan")
@click.argument("what", nargs=-1, metavar="[FABRIC | NODE DEVICE[/PORT]]", shell_complete=node_or_fabric_names)
@click.option("--raw", is_flag=True, help="What the tool printed on the node, as it is (takes NODE DEVICE).")
@output
def fabric_scan(what: tuple[str, ...], raw: bool, output: str) -> None:
    """Draw the map of a fabric now: from the node that would be asked next, or from the port you name.

    \b
    llmgw ctl fabric-scan
    llmgw ctl fabric-scan compute
    llmgw ctl fabric-scan gpu-01 mlx5_3

    Exit status 8 when the fabric cannot be scanned.
    """
    if len(what) > 2:
        raise click.UsageError("name a fabric, or a node and one of its adapters")
    if raw and len(what) != 2:
        raise click.UsageError("--raw is for one port: name a node and one of its adapters")
    order: dict[str, object] = {"raw": raw}
    if len(what) == 2:
        node, device = what
        device, _, number = device.partition("/")
        if number and not (number.isascii() and number.isdigit()):
            raise click.UsageError(f"{what[1]!r} is no port: write DEVICE or DEVICE/PORT, such as mlx5_0/1")
        order |= {"node": node, "device": device, "number": int(number or 1)}
    elif what:
        order["fabric"] = what[0]

    async def act(plane: Plane) -> int:
        from llmgw.ctl import fabricviews
        from llmgw.ctl.show import console
        from llmgw.wire.fabricapi import ScanReply

        answer = await plane.post("fabric-scan", order, within=_SCAN_WITHIN)
        reply = answer.read(ScanReply)
        if output == "json":
            pretty(answer.data)
        elif raw:
            click.echo(reply.raw, nl=False)
        else:
            out = console()
            out.print(fabricviews.scanned(answer, out.width), soft_wrap=not out.is_terminal)
        return 8 if reply.scan.error else 0

    run(act, output=output)


@click.command("fabric-diff")
@click.argument("what", nargs=-1, metavar="[FABRIC] [FROM] [TO]", shell_complete=fabric_names)
@output
def fabric_diff(what: tuple[str, ...], output: str) -> None:
    """What changed between two maps that are kept, and what that touches.

    FROM and TO are scans by number (`llmgw ctl fabric`), or by age: 30m, 2h, 1d. By default the newest map is
    compared with the complete one before it. FABRIC may be left out where there is only one.

    \b
    llmgw ctl fabric-diff
    llmgw ctl fabric-diff compute 1d
    llmgw ctl fabric-diff 17 23
    """
    if len(what) > 3:
        raise click.UsageError("name at most a fabric and two scans")

    async def act(plane: Plane) -> None:
        from llmgw.ctl import fabricviews
        from llmgw.ctl.show import console
        from llmgw.wire.fabricapi import FabricsReply

        names = {row.name for row in (await plane.get("fabrics")).read(FabricsReply).fabrics} if what else set()
        named = bool(what) and (what[0] in names or len(what) == 3)
        name, scans = (what[0], what[1:]) if named else ("", what)
        query = {"name": name, "from": scans[0] if scans else "", "to": scans[1] if len(scans) > 1 else ""}
        answer = await plane.get("fabric/diff", query, within=60.0)
        if output == "json":
            pretty(answer.data)
        else:
            out = console()
            out.print(fabricviews.difference(answer, out.width), soft_wrap=not out.is_terminal)

    run(act, output=output)


@click.command("fabric-route")
@click.argument("start", metavar="FROM")
@click.argument("end", metavar="TO")
@click.option(
    "--fabric", "name", default="", metavar="FABRIC", shell_complete=fabric_names, help="Where there is more than one."
)
@output
def fabric_route(start: str, end: str, name: str, output: str) -> None:
    """The cables that traffic takes from one port to another, by the switches' own tables.

    FROM and TO are NODE:DEVICE, or a port's GUID. The way back may be another.

    llmgw ctl fabric-route gpu-01:mlx5_0 gpu-02:mlx5_0
    """

    async def act(plane: Plane) -> int:
        from llmgw.ctl import fabricviews
        from llmgw.ctl.show import console
        from llmgw.wire.fabricapi import RouteReply

        answer = await plane.get("fabric/route", {"name": name, "from": start, "to": end}, within=_ROUTE_WITHIN)
        if output == "json":
            pretty(answer.data)
        else:
            out = console()
            out.print(fabricviews.route(answer, out.width), soft_wrap=not out.is_terminal)
        return 1 if answer.read(RouteReply).broken else 0

    run(act, output=output)


COMMANDS = (fabrics, fabric, fabric_scan, fabric_diff, fabric_route)
