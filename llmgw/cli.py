"""The programs `llmgw`, `llmgw-plane` and `llmgw-node`: what goes wrong becomes one line and an exit status."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from llmgw import __version__
from llmgw.commands import Group
from llmgw.errors import BadInput, LlmgwError
from llmgw.files import FULL

#: What a shell says of a program that Ctrl-C has ended, and what click says of one whose reader went away.
INTERRUPTED, BROKEN_PIPE = 130, 1


class Lazy(Group):
    """A group whose commands are imported when they are asked for: one must not wait for what another needs."""

    def __init__(self, *, lazy: Mapping[str, str], **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]  # click's own long list of settings
        self._lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._lazy})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        place = self._lazy.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = place.partition(":")
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, click.Command)
        return found


@click.command(
    cls=Lazy,
    lazy={"ctl": "llmgw.ctl.main:ctl"},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="llmgw")
def _llmgw() -> None:
    """Run LLM engines on a fleet of GPU machines."""


@_llmgw.command()
@click.option("--once", is_flag=True, help="Stop after the chat.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Where it all lies, and stays.")
def demo(once: bool, directory: Path | None) -> None:
    """A plane, two nodes and two models on this machine, one of them over both nodes, and a chat with each."""
    from functools import partial

    import trio

    from llmgw.demo.main import run

    trio.run(partial(run, once=once, directory=directory))


def llmgw(args: Sequence[str] | None = None) -> int:
    """`llmgw`. The exit status."""
    return call(_llmgw, "llmgw", args)


def plane(args: Sequence[str] | None = None) -> int:
    """`llmgw-plane`. The exit status."""
    from llmgw.plane.cli import plane as group

    return call(group, "llmgw-plane", args)


def node(args: Sequence[str] | None = None) -> int:
    """`llmgw-node`. The exit status."""
    from llmgw.node.cli import node as group

    return call(group, "llmgw-node", args)


def call(command: click.Command, name: str, args: Sequence[str] | None = None) -> int:
    """Run a command; what went wrong as a line on stderr and an exit status. Only a defect ends in a traceback."""
    _writable()
    given = sys.argv[1:] if args is None else list(args)
    try:
        _readable(given)
        status = command.main(args=given, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        return _status(unwrapped(error), name)
    # A command may leave with a status of its own; what else it returns is its own affair.
    return status if isinstance(status, int) else 0


def _writable() -> None:
    """Let the output take what is written: where it is closed, and where the locale has no sign for a letter."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _readable(args: Sequence[str]) -> None:
    """Raise BadInput for an argument whose bytes are no text: it could be written nowhere, not even into an error."""
    for arg in args:
        try:
            arg.encode()
        except UnicodeEncodeError:
            encoding = sys.getfilesystemencoding().upper()
            raise BadInput(f"the argument {os.fsencode(arg)!r} is not {encoding} text") from None


def unwrapped(error: BaseException) -> BaseException:
    """What a group of errors comes to, when it is one error all the way down; Ctrl-C counts before everything."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    if error.subgroup(KeyboardInterrupt) is not None:
        return KeyboardInterrupt()
    inside = [unwrapped(one) for one in error.exceptions]
    ours = [one for one in inside if isinstance(one, LlmgwError)]
    if len(inside) == 1:
        return inside[0]
    return ours[0] if len(ours) == len(inside) else error


def _status(error: BaseException, name: str) -> int:
    match error:
        case click.exceptions.Exit():
            return error.exit_code
        case click.ClickException():
            error.show()
            return error.exit_code
        case LlmgwError():
            _say(f"{name}: {error}")
            return error.exit_status
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case BrokenPipeError():
            _flushed_nowhere()
            return BROKEN_PIPE
        case OSError() if error.errno in FULL and not error.filename:
            _say(f"{name}: the output cannot be written: {error.strerror}")
            _flushed_nowhere()
            return 1
        case OSError() if error.filename and error.strerror:
            _say(f"{name}: {error.filename}: {error.strerror}")
            return 1
    raise error


def _flushed_nowhere() -> None:
    """The interpreter flushes stdout once more at its end, and must find somewhere to flush it to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(line: str) -> None:
    try:
        click.echo(line, err=True)
    except OSError:
        return
