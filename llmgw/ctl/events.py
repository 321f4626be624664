"""What happened in the fleet, and what happens now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import node_names
from llmgw.ctl.running import complain, output, pretty, run

if TYPE_CHECKING:
    from llmgw.ctl.client import Answer, Plane

_POLL = 20.0
_RETRY = 2.0


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on as they happen, until Ctrl-C.")
@click.option("-n", "--limit", default=100, type=click.IntRange(1, 10_000), help="How many of the last. [100]")
@click.option("--node", default="", metavar="NAME", shell_complete=node_names, help="Only what happened at this node.")
@output
def events(follow: bool, limit: int, node: str, output: str) -> None:
    """What happened, oldest first; with -o json -f one event a line."""

    async def act(plane: Plane) -> None:
        from llmgw.ctl.watch import while_read
        from llmgw.wire.api import EventsReply

        answer = await plane.get("events", {"limit": limit, "node": node})
        if output == "json" and not follow:
            pretty(answer.data)
            return
        latest = _show(answer, output)
        if not (follow or answer.read(EventsReply).events):
            click.echo(f"no event of {node} is kept" if node else "nothing has happened yet")
        with while_read():
            while follow:
                latest = await _next(plane, latest, node, output)

    run(act, output=output)


async def _next(plane: Plane, latest: int, node: str, output: str) -> int:
    import trio

    from llmgw.errors import TimedOut, Unavailable

    try:
        return _show(
            await plane.get("events", {"after": latest, "wait": _POLL, "node": node}, within=_POLL + 15), output
        )
    except (Unavailable, TimedOut) as error:
        complain(error, output)
        await trio.sleep(_RETRY)
        return latest


def _show(answer: Answer, output: str) -> int:
    import msgspec

    from llmgw.ctl.show import clean, console, when
    from llmgw.wire.api import EventsReply

    reply = answer.read(EventsReply)
    out = console()
    for event in reply.events:
        if output == "json":
            click.echo(msgspec.json.encode(event))
        else:
            out.print(f"[dim]{when(event.clock)}[/dim]  ", end="")
            out.print(f"{event.kind}  {clean(event.text)}", markup=False, soft_wrap=True)
    return reply.latest


COMMANDS = (events,)
