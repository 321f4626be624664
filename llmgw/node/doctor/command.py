"""`llmgw-node doctor`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="node.toml; else /etc/llmgw, else --dir.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="The node's state.")
@click.option("--only", multiple=True, metavar="CHECK", help="A check's id, or a group of them (gpu); may be repeated.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--list", "list_checks", is_flag=True, help="Only name the checks.")
@click.option("-q", "--quiet", is_flag=True, help="Only what is wrong.")
@click.pass_context
def doctor(
    ctx: click.Context,
    config: Path | None,
    directory: Path | None,
    only: tuple[str, ...],
    output: str,
    list_checks: bool,
    quiet: bool,
) -> None:
    """Examine this machine. No plane is needed and nothing is disturbed.

    Exit status: 0 when all is well, 1 when something deserves a look, 2 when something is broken.
    """
    from functools import partial

    import msgspec
    import trio

    from llmgw.node.doctor import run, text
    from llmgw.node.settings import find, load

    if list_checks:
        for check in run.chosen(only):
            click.echo(check.id)
        return
    settings = load(find(config, directory), directory=directory)
    reply = trio.run(partial(run.doctor, settings, only))
    if output == "json":
        click.echo(msgspec.json.format(msgspec.json.encode(msgspec.to_builtins(reply)), indent=2).decode())
    else:
        text.show(reply, everything=not quiet)
    ctx.exit(run.exit_status(reply))
