"""One node's own examination, asked for from here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import node_names
from llmgw.ctl.naming import segment
from llmgw.ctl.running import output, pretty, run

if TYPE_CHECKING:
    from llmgw.ctl.client import Plane

_WITHIN = 75.0


@click.command()
@click.argument("node", shell_complete=node_names)
@click.option("--only", multiple=True, metavar="CHECK", help="Only this check; may be given again.")
@output
def doctor(node: str, only: tuple[str, ...], output: str) -> None:
    """Let a node examine itself: pass, warn or fail per check, and the command that fixes it.

    Exit status 0 when all passed, 1 with warnings, 2 with failures.
    """

    path = f"doctor/{segment(node)}"

    async def act(plane: Plane) -> int:
        from llmgw.ctl import nodetables
        from llmgw.ctl.show import console
        from llmgw.wire.api import DoctorView

        answer = await plane.get(path, {"only": ",".join(only)}, within=_WITHIN)
        reply = answer.read(DoctorView)
        if output == "json":
            pretty(answer.data)
        else:
            out = console()
            out.print(nodetables.findings(reply, out.width), soft_wrap=not out.is_terminal)
        outcomes = {finding.outcome for finding in reply.findings}
        return 2 if "fail" in outcomes else 1 if "warn" in outcomes else 0

    run(act, output=output)


COMMANDS = (doctor,)
