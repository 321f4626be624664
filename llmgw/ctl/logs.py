"""Logs of a node: its agent's, its shards', of this run or an earlier one, and as they come."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import node_names, run_names, source_names
from llmgw.ctl.naming import segment
from llmgw.ctl.running import complain, output, pretty, run

if TYPE_CHECKING:
    from llmgw.ctl.client import Answer, Plane, Query

#: Seconds that the node waits for a next line before it says that there was none.
_POLL = 20.0
_RETRY = 2.0


@click.command()
@click.argument("node", shell_complete=node_names)
@click.argument("source", default="agent", shell_complete=source_names)
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come, until Ctrl-C.")
@click.option("-n", "--lines", default=100, type=click.IntRange(0, 100_000), help="How many of the last lines. [100]")
@click.option(
    "--run",
    "which",
    default="",
    metavar="RUN",
    shell_complete=run_names,
    help="An earlier run; without one the newest.",
)
@output
def logs(node: str, source: str, follow: bool, lines: int, which: str, output: str) -> None:
    """Show a log of a node: its agent's, or that of SOURCE, a shard there."""
    path = f"logs/{segment(node)}/{segment(source, slashes=True)}"

    async def act(plane: Plane) -> None:
        from llmgw.ctl.watch import while_read

        answer = await plane.get(path, {"lines": lines, "run": which})
        cursor = _show(answer, output, follow, first=True)
        with while_read():
            while follow:
                cursor = await _next(plane, path, which, cursor, output) or cursor

    run(act, output=output)


async def _next(plane: Plane, path: str, which: str, cursor: str, output: str) -> str:
    import trio

    from llmgw.errors import TimedOut, Unavailable

    query: Query = {"lines": 10_000, "run": which, "after": cursor, "wait": _POLL}
    try:
        return _show(await plane.get(path, query, within=_POLL + 15), output, True)
    except (Unavailable, TimedOut) as error:
        # The plane restarts, the agent comes back: the cursor says where to go on.
        complain(error, output)
        await trio.sleep(_RETRY)
        return ""


def _show(answer: Answer, output: str, follow: bool, *, first: bool = False) -> str:
    from llmgw.ctl.show import clean, size
    from llmgw.wire.api import LogsReplyView

    reply = answer.read(LogsReplyView)
    if output == "json":
        if not follow:
            pretty(answer.data)
        elif first or reply.lines:
            click.echo(answer.data)
        return reply.cursor
    if reply.truncated:
        click.echo("... lines before this are left out", err=True)
    for line in reply.lines:
        click.echo(clean(line))
    if first and not follow and sys.stderr.isatty():
        for found in reply.sources:
            runs = f", runs {' '.join(found.runs)}" if found.runs else ""
            click.echo(f"# {found.name} ({size(found.bytes)}{runs})", err=True)
    return reply.cursor


COMMANDS = (logs,)
