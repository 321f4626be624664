"""`llmgw-plane`: make a plane, check it, run it, run a gateway."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw import __version__
from llmgw.commands import Group

_config = click.option("--config", type=click.Path(path_type=Path), help="plane.toml; else /etc/llmgw, else --dir.")
_directory = click.option(
    "--dir", "directory", type=click.Path(path_type=Path), help="The plane's state [default: /var/lib/llmgw-plane]."
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="llmgw-plane")
def plane() -> None:
    """The control plane of llmgw: it places models on nodes and relays requests to them."""


@plane.command()
@_directory
@click.option("--host", "hosts", multiple=True, help="A further name or address of this plane; may be repeated.")
def init(directory: Path | None, hosts: tuple[str, ...]) -> None:
    """Make a new plane: its CA, its certificates, the admin API's token, plane.toml."""
    from llmgw.plane import init as making
    from llmgw.plane.settings import DIRECTORY

    made = making.init(directory or DIRECTORY, hosts)
    option = f" --dir {made.directory}" if directory else ""
    click.echo(f"A plane lies in {made.directory}. Its CA's fingerprint is {made.fingerprint}")
    click.echo(f"It can be reached as {', '.join(made.hosts)}")
    click.echo(f"\nNext:\n  llmgw-plane run{option}\n  llmgw ctl{option} token create    # one for each node")


@plane.command()
@_config
@_directory
def check(config: Path | None, directory: Path | None) -> None:
    """Read the settings and the certificates, and say what is wrong with them. Changes nothing."""
    from llmgw.plane.check import check as checked
    from llmgw.plane.settings import find, load

    found = find(config, directory)
    settings = load(found, directory=directory)
    for line in checked(settings, found):
        click.echo(line)


@plane.command()
@_config
@_directory
def run(config: Path | None, directory: Path | None) -> None:
    """Run the plane until it is stopped."""
    from functools import partial

    import trio

    from llmgw import log
    from llmgw.plane import main
    from llmgw.plane.settings import find, load

    again = partial(load, find(config, directory), directory=directory)
    settings = again()
    log.set_up(settings.log)
    if settings.insecure:
        log.shout("INSECURE MODE: no certificates; whoever reaches this machine's loopback steers the fleet")
    trio.run(main.run, settings, again)


@plane.command()
@_config
@_directory
@click.option("--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes on the one port.")
def gateway(config: Path | None, directory: Path | None, workers: int) -> None:
    """Relay requests in processes of their own, on routes that the plane feeds; set `inside = false` in [gateway]."""
    import trio

    from llmgw import log
    from llmgw.errors import NotFound
    from llmgw.plane.gateway import process
    from llmgw.plane.settings import find, load

    settings = load(find(config, directory), directory=directory)
    if not settings.directory.is_dir():
        raise NotFound(f"there is no plane in {settings.directory}", remedy="give its directory with --dir or --config")
    log.set_up(settings.log)
    trio.run(process.run, settings, workers)


@plane.command()
@click.argument("name")
@click.option("--model", "models", multiple=True, help="Only this model; may be repeated. [default: all]")
def key(name: str, models: tuple[str, ...]) -> None:
    """Make an API key for the gateway, called NAME in its metrics. It is shown this once, alone on standard output."""
    import json

    from llmgw.plane.gateway.keys import new_key

    secret, made = new_key(name, models)
    click.echo(secret)
    # JSON's strings and lists of strings are TOML's.
    lines = ["[[gateway.keys]]", f"name = {json.dumps(name)}", f'hash = "{made.hash}"']
    lines += [f"models = {json.dumps(models)}"] if models else []
    click.echo(
        "\nAdd this to plane.toml, then restart the plane, and the gateways where they run by themselves:\n\n"
        + "\n".join(lines),
        err=True,
    )


@plane.command()
@_config
@_directory
def restored(config: Path | None, directory: Path | None) -> None:
    """Say that this plane's state was restored from a backup, before it is started: its agents obey it again."""
    import trio

    from llmgw.plane.restored import raise_epoch
    from llmgw.plane.settings import find, load

    settings = load(find(config, directory), directory=directory)
    epoch = trio.run(raise_epoch, settings.path(settings.store))
    click.echo(f"The epoch is {epoch} now: start the plane. Nodes that joined since the backup must join again.")


@plane.command()
@_config
@_directory
@click.argument("file")
def backup(config: Path | None, directory: Path | None, file: str) -> None:
    """Write all that makes this plane this plane into one FILE, or into a directory. The plane may run meanwhile."""
    from llmgw.errors import NotFound
    from llmgw.plane import backup as backing
    from llmgw.plane.settings import find, load

    if file.endswith("/") and not Path(file).is_dir():
        raise NotFound(f"there is no directory {file}", remedy="make it, or name a file")
    made = backing.backup(load(find(config, directory), directory=directory), Path(file))
    click.echo(f"{made.path}: {made.bytes / (1 << 20):.1f} MiB, {', '.join(made.files)}")
    click.echo("It holds the CA's key: keep it as you keep that.", err=True)
    if made.missing:
        click.echo(f"Not in it, since not there: {', '.join(made.missing)}", err=True)


@plane.command()
@_config
@_directory
@click.argument("file", type=click.Path(path_type=Path))
def restore(config: Path | None, directory: Path | None, file: Path) -> None:
    """Put a backup in place while the plane is stopped: of `backup`, or the copy that an upgrade left (plane.db.v*)."""
    from llmgw.plane import backup as backing
    from llmgw.plane.settings import find, load

    done = backing.restore(lambda: load(find(config, directory), directory=directory), file)
    if done.aside is not None:
        click.echo(f"The state that was there lies in {done.aside}")
    if done.files:
        click.echo(f"Put back with the state: {', '.join(done.files)}")
    if done.kept:
        click.echo(f"Left as they are here, and different in the backup: {', '.join(done.kept)}")
    option = f" --dir {directory}" if directory else ""
    click.echo(f"The epoch is {done.epoch} now. Next:\n  llmgw-plane check{option}\n  start the plane")
    click.echo("Nodes that joined, or renewed their certificate, since the backup must join again.")
