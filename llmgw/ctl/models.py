"""Models and one replica: how it stands, how many there shall be, what a model was before."""

from __future__ import annotations

import click

from llmgw.ctl.complete import model_names, replica_names, revision_names
from llmgw.ctl.naming import segment
from llmgw.ctl.running import done, output, show, watched

MODEL = click.argument("model", shell_complete=model_names)


@click.command()
@click.argument("name", shell_complete=replica_names)
@watched
def replica(name: str, output: str, watch: float | None) -> None:
    """Everything about one replica: its members, their network, what it waits for, how it failed.

    NAME is its id, the beginning of one, the id of one of its shards, or a model's name where that has one replica.
    """
    from llmgw.ctl import modeltables

    show(f"replicas/{segment(name, slashes=True)}", modeltables.replica, output=output, watch=watch)


@click.command(context_settings={"ignore_unknown_options": True})  # so that -1 is a number, and refused as one
@MODEL
@click.argument("replicas", type=int, metavar="N")
@output
def scale(model: str, replicas: int, output: str) -> None:
    """Want N replicas of a model, until models are applied again."""
    done(_path(model, "scale"), {"replicas": replicas}, output=output)


@click.command()
@MODEL
@click.option("--to", type=int, shell_complete=revision_names, metavar="REVISION", help="Not the one before: this one.")
@output
def rollback(model: str, to: int | None, output: str) -> None:
    """Run a model with the profile it had before, until models are applied again.

    Its replicas are replaced one after the other, as with any change; those that still have that profile stay.
    """
    done(_path(model, "rollback"), {"revision": to}, output=output)


@click.command()
@MODEL
@watched
def history(model: str, output: str, watch: float | None) -> None:
    """The profiles that a model had, and what each of them changed."""
    from llmgw.ctl import modeltables

    show(_path(model, "history"), modeltables.history, output=output, watch=watch)


def _path(model: str, verb: str) -> str:
    return f"models/{segment(model, slashes=True)}/{verb}"


COMMANDS = (replica, history, scale, rollback)
