"""Join tokens and certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import node_names, token_ids
from llmgw.ctl.naming import OrderedGroup, segment
from llmgw.ctl.running import output, pretty, run, show, watched

if TYPE_CHECKING:
    from llmgw.ctl.client import Plane


@click.group(cls=OrderedGroup)
def token() -> None:
    """Join tokens: each lets one machine in, once."""


@token.command()
@click.option("--ttl", default="1h", metavar="TIME", help="For how long it can be used: 30m, 1h, 7d. [1h]")
@click.option("--node", default="", metavar="NAME", shell_complete=node_names, help="Only this node may use it.")
@click.option("--replace", is_flag=True, help="The node was set up anew: its older certificates end. Needs --node.")
@click.option("--note", default="", help="For whom or what it is; shown by `token list`.")
@output
def create(ttl: str, node: str, replace: bool, note: str, output: str) -> None:
    """Make a token. It is shown this once."""
    from llmgw.units import parse_duration

    try:
        seconds = parse_duration(ttl)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--ttl") from None

    async def act(plane: Plane) -> None:
        from llmgw.ctl.show import age
        from llmgw.wire.api import TokenReply

        wanted = {"seconds": seconds, "node": node, "replace": replace, "note": note}
        answer = await plane.post("tokens", wanted)
        if output == "json":
            pretty(answer.data)
            return
        made = answer.read(TokenReply)
        # The token alone goes to stdout, so that a script can take it from there.
        click.echo(made.token)
        join = f"llmgw-node join {made.plane or 'wss://PLANE:7443'} --token ..." + (f" --name {node}" if node else "")
        click.echo(f"Good once, for {age(made.expires_in)}. On the machine: {join}", err=True)

    run(act, output=output)


@token.command("list")
@watched
def list_tokens(output: str, watch: float | None) -> None:
    """Every token that is not long over."""
    from llmgw.ctl import identitytables

    show("tokens", identitytables.tokens, output=output, watch=watch)


@token.command()
@click.argument("id", shell_complete=token_ids)
@output
def revoke(id: str, output: str) -> None:
    """End a token before it was used."""

    path = f"tokens/{segment(id)}"

    async def act(plane: Plane) -> None:
        from llmgw.wire.api import DoneReply

        answer = await plane.delete(path)
        if output == "json":
            pretty(answer.data)
        else:
            click.echo(answer.read(DoneReply).text)

    run(act, output=output)


@click.command()
@watched
def certs(output: str, watch: float | None) -> None:
    """Every certificate that the plane gave out: whose it is and when it expires."""
    from llmgw.ctl import identitytables

    show("certs", identitytables.certs, output=output, watch=watch)


COMMANDS = (token, certs)
