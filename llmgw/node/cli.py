"""`llmgw-node`: join a plane, check this machine, run the agent."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw import __version__
from llmgw.commands import Group
from llmgw.node.doctor.command import doctor

_config = click.option("--config", type=click.Path(path_type=Path), help="node.toml; else /etc/llmgw, else --dir.")
_directory = click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="The node's state [default: /var/lib/llmgw-node]."
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmgw-node")
def node() -> None:
    """The agent of llmgw: it runs engines on this machine for a plane."""


@node.command()
@click.argument("url")
@click.option(
    "--token",
    required=True,
    envvar="LLMGW_TOKEN",
    metavar="TOKEN|@FILE|-",
    help="From `llmgw ctl token create`: @FILE reads it from a file, - from standard input, and without the option "
    "LLMGW_TOKEN is read. Written here as it is, every user of this machine sees it in `ps` meanwhile.",
)
@click.option("--name", help="This node's name [default: the host's].")
@click.option("--again", is_flag=True, help="Replace the identity that this machine has.")
@_directory
def join(url: str, token: str, name: str | None, again: bool, directory: Path | None) -> None:
    """Get this machine an identity from the plane at URL (wss://HOST:7443)."""
    import sys
    from functools import partial

    import trio

    from llmgw import log, pki
    from llmgw.config import LogSettings
    from llmgw.files import read_whole
    from llmgw.node import join as joining
    from llmgw.node.settings import DIRECTORY, host_name
    from llmgw.wire.facts import NodeId

    log.set_up(LogSettings(level="warning"))
    if token.startswith("@"):
        token = read_whole(Path(token[1:]), "the token").decode(errors="replace")
    elif token == "-":
        token = sys.stdin.readline()
    wanted = NodeId(name) if name else host_name()
    place = directory or DIRECTORY
    identity = trio.run(partial(joining.join, url, token, wanted, place.absolute(), again=again))
    click.echo(f"Joined as {identity.node}; the certificate is good until {pki.utc(identity.peer.not_after)}")
    click.echo(f"Next: llmgw-node run{f' --dir {place}' if directory else ''}")


@node.command()
@_config
@_directory
def check(config: Path | None, directory: Path | None) -> None:
    """Read the settings and the certificate, and say what is wrong with them. Changes nothing."""
    import time

    from llmgw import pki
    from llmgw.errors import LlmgwError
    from llmgw.node.identity import Identity
    from llmgw.node.settings import find, load

    found = find(config, directory)
    settings = load(found, directory=directory)
    click.echo(f"settings: {found or 'defaults (there is no node.toml)'}")
    click.echo(f"planes: {', '.join(map(str, settings.addresses)) or 'none'}")
    if settings.insecure:
        click.echo("INSECURE MODE: no certificates, loopback only")
        return
    identity = Identity.load(settings.directory)
    identity.context()
    if problem := identity.problem(time.time()):
        raise LlmgwError(problem)
    click.echo(f"identity: {identity.node}, good until {pki.utc(identity.peer.not_after)}")


@node.command()
@_config
@_directory
def run(config: Path | None, directory: Path | None) -> None:
    """Run the agent until it is stopped. Engines go on without it."""
    from llmgw.node.spare import NEEDLESS, without
    from llmgw.process import share_heap

    share_heap()
    with without(*NEEDLESS):
        import httpcore  # noqa: F401  # httpx would load it, and what it takes along, with its first client
        import trio

        from llmgw import log
        from llmgw.node.main import run as run_agent
        from llmgw.node.settings import find, load

    settings = load(find(config, directory), directory=directory)
    log.set_up(settings.log)
    if settings.insecure:
        log.shout("INSECURE MODE: no certificates; whoever reaches this machine's loopback steers this node")
    trio.run(run_agent, settings)


@node.command()
@_config
@_directory
def share(config: Path | None, directory: Path | None) -> None:
    """Give whole weights of this node to other nodes of the fleet, at `weights_listen` of node.toml.

    They name it in `weights_peers`. It is a process beside the agent, which nothing connects to.
    """
    import trio

    from llmgw import log
    from llmgw.node.settings import find, load
    from llmgw.node.weights.share import serve

    settings = load(find(config, directory), directory=directory)
    log.set_up(settings.log)
    trio.run(serve, settings)


node.add_command(doctor)
