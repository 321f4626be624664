"""The fleet: status, nodes, models, replicas, why, problems, and what is wanted."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from llmgw.ctl.complete import model_names
from llmgw.ctl.naming import segment
from llmgw.ctl.running import output, pretty, run, show, watched

if TYPE_CHECKING:
    from llmgw.ctl.client import Answer, Plane


@click.command()
@watched
def status(output: str, watch: float | None) -> None:
    """The fleet in a few numbers."""
    from llmgw.ctl import tables

    show("status", tables.status, output=output, watch=watch)


@click.command()
@watched
def nodes(output: str, watch: float | None) -> None:
    """Every node, in one line each."""
    from llmgw.ctl import tables

    show("nodes", tables.nodes, output=output, watch=watch)


@click.command()
@watched
def models(output: str, watch: float | None) -> None:
    """Every wanted model: how many replicas are wanted, placed, ready."""
    from llmgw.ctl import tables

    show("models", tables.models, output=output, watch=watch)


@click.command()
@click.option("--shards", is_flag=True, help="A line for each member of each replica.")
@watched
def replicas(shards: bool, output: str, watch: float | None) -> None:
    """Every replica: its state, where it runs, how it failed last."""
    from llmgw.ctl import replicatables

    show("replicas", replicatables.members if shards else replicatables.replicas, output=output, watch=watch)


@click.command()
@watched
def problems(output: str, watch: float | None) -> None:
    """Every open problem of every node, the worst and oldest first."""
    from llmgw.ctl import tables

    show("problems", tables.problems, output=output, watch=watch)


@click.command()
@click.argument("model", shell_complete=model_names)
@watched
def why(model: str, output: str, watch: float | None) -> None:
    """Why a model has fewer replicas than wanted: per node, and the smallest change that would help."""
    from llmgw.ctl import tables

    show(f"why/{segment(model, slashes=True)}", tables.why, output=output, watch=watch)


@click.command()
@click.option(
    "-f", "--file", "path", required=True, metavar="FILE", type=click.Path(), help='models.toml; "-" is standard input.'
)
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@output
def apply(path: str, dry_run: bool, output: str) -> None:
    """Want these models, and no others."""

    async def act(plane: Plane) -> None:
        text = sys.stdin.buffer.read() if path == "-" else _read(path)
        answer = await plane.post("apply", text, query={"dry_run": int(dry_run), "name": spoken(path)}, within=60)
        if output == "json":
            pretty(answer.data)
        else:
            _applied(answer)

    run(act, output=output)


def spoken(path: str) -> str:
    """What the plane is to call a file in its errors."""
    return "standard input" if path == "-" else path


def _read(path: str) -> bytes:
    from pathlib import Path

    from llmgw.files import read_whole

    return read_whole(Path(path))


def _applied(answer: Answer) -> None:
    from llmgw.wire.modelapi import ApplyReply

    reply = answer.read(ApplyReply)
    would = "would be " if reply.dry_run else ""
    for names, done in ((reply.added, "added"), (reply.changed, "changed"), (reply.removed, "removed")):
        for name in names:
            how = reply.words.get(name, "")
            click.echo(f"{name} {would}{done}{f': {how}' if how else ''}")
    if not (reply.added or reply.changed or reply.removed):
        click.echo("nothing would change" if reply.dry_run else "nothing changed")


COMMANDS = (status, nodes, models, replicas, why, problems, apply)
