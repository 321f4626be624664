"""One node: everything about it on one screen, and what an operator does to it."""

from __future__ import annotations

import sys

import click

from llmgw.ctl.complete import node_names, problem_words
from llmgw.ctl.naming import NodeGroup, segment
from llmgw.ctl.running import complain, done, output, show, watched
from llmgw.errors import BadInput

NAME = click.argument("name", shell_complete=node_names)


@click.group(cls=NodeGroup)
def node() -> None:
    """Show one node (`node NAME`), or act on it."""


@node.command("show")
@NAME
@watched
def show_node(name: str, output: str, watch: float | None) -> None:
    """Everything the plane knows of a node, on one screen."""
    from llmgw.ctl import nodetables

    show(f"nodes/{segment(name)}", nodetables.node, output=output, watch=watch)


@node.command()
@NAME
@click.option("--why", default="", help="Told to the node, and kept.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output
def revoke(name: str, why: str, yes: bool, output: str) -> None:
    """Shut a node out: its certificates count no more, its stream ends. To return it must join again."""
    _sure(f"Shut {name} out? To return it must join again.", yes)
    done(_path(name, "revoke"), {"why": why}, output=output)


@node.command()
@NAME
@click.option("--yes", is_flag=True, help="Do not ask.")
@output
def forget(name: str, yes: bool, output: str) -> None:
    """Delete a node that is gone: its cordon, labels and certificates too."""
    _sure(f"Forget {name}? Its labels are lost, and to return it must join again.", yes)
    done(_path(name, "forget"), output=output)


@click.command()
@NAME
@click.argument("labels", nargs=-1, required=True, metavar="KEY=VALUE|KEY-...")
@output
def label(name: str, labels: tuple[str, ...], output: str) -> None:
    """Set labels (KEY=VALUE) and take some away (KEY-)."""
    wanted: dict[str, str | None] = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if equals and key:
            wanted[key] = value
        elif text.endswith("-") and len(text) > 1:
            wanted[text[:-1]] = None
        else:
            error = BadInput(f"{text!r} is no label", remedy="write KEY=VALUE to set, KEY- to take away")
            complain(error, output)
            raise click.exceptions.Exit(error.exit_status)
    done(_path(name, "label"), {"labels": wanted}, output=output)


def _switch(verb: str, words: str) -> click.Command:
    """A command that only names a node."""

    @click.command(verb, help=words)
    @NAME
    @output
    def switch(name: str, output: str) -> None:
        done(_path(name, verb), output=output)

    return switch


cordon = _switch("cordon", "Let a node take no new shard; what runs there goes on.")
uncordon = _switch("uncordon", "Let a node take new shards again; that ends a drain as well.")
undrain = _switch("undrain", "End a drain; the node takes shards again, unless it is cordoned.")


@click.command()
@NAME
@click.option("--within", metavar="TIME", help="How long what leaves may finish its requests (10m); else as the plane.")
@output
def drain(name: str, within: str | None, output: str) -> None:
    """Empty a node: its replicas move elsewhere, and it takes no new ones.

    What serves there goes on until its replacement is ready, then gets no new requests and may finish those it has.
    `ctl node NAME` shows what is still there; `ctl nodes` says when it is drained.
    """
    done(_path(name, "drain"), {"within": _seconds(within, "--within") if within else None}, output=output)


@click.command()
@NAME
@click.argument("subject", shell_complete=problem_words)
@click.argument("code", shell_complete=problem_words)
@click.option("--for", "how_long", default="24h", metavar="TIME", help="For how long (24h); 0 ends it.")
@output
def ack(name: str, subject: str, code: str, how_long: str, output: str) -> None:
    """Acknowledge a problem of a node for a time: SUBJECT and CODE as `problems` shows them."""
    seconds = _seconds(how_long, "--for")
    done(_path(name, "acknowledge"), {"subject": subject, "code": code, "seconds": seconds}, output=output)


@node.command()
@NAME
@click.option("--clear", is_flag=True, help="Take it back: the node is compared with its peers again.")
@output
def expect(name: str, clear: bool, output: str) -> None:
    """Confirm that a node has now what it should have: less than this will be a problem.

    Counted are GPUs by model, NVLinks, ports by role and kind with their rate, and memory. A node of which nothing was
    confirmed is compared with its peers: those with its label `role`, else with GPUs of the same models.
    """
    done(_path(name, "expect"), {"clear": clear}, output=output)


def _seconds(text: str, option: str) -> float:
    from llmgw.units import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from None


def _path(name: str, verb: str) -> str:
    return f"nodes/{segment(name)}/{verb}"


def _sure(question: str, yes: bool) -> None:
    """Ask a person; a program has said --yes, or meant it by not having a terminal."""
    if not yes and sys.stdin.isatty():
        click.confirm(question, abort=True)


node.add_command(label)

COMMANDS = (node, cordon, uncordon, drain, undrain, label, ack)
