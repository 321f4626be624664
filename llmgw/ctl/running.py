"""How every command runs: its options, one question or a watch, and the exit status that its end has."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from llmgw.errors import LlmgwError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from llmgw.ctl.client import Answer, Plane
    from llmgw.ctl.target import Target

F = TypeVar("F", bound=Callable[..., object])

INTERRUPTED = 130


class _Seconds(click.ParamType[float]):
    name = "seconds"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = float(str(value))
        except ValueError:
            seconds = 0.0
        if not 0.1 <= seconds <= 3600:
            self.fail(f"{value!r} is not 0.1 to 3600 seconds: put --watch last, or write --watch=2", param, ctx)
        return seconds


def output(command: F) -> F:
    """`-o json` for programs."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json"]),
        default="table",
        help="A table for people, or the API's JSON (docs/api.md).",
    )(command)


def watched(command: F) -> F:
    """`-o json`, and `--watch` to see it change."""
    again = click.option(
        "--watch",
        type=_Seconds(),
        is_flag=False,
        flag_value=2.0,
        default=None,
        metavar="[SECONDS]",
        help="Ask again every so many seconds (2); with -o json one line each time.",
    )
    return output(again(command))


def target(ctx: click.Context) -> Target:
    """The plane that the options before the command speak of. Raises LlmgwError."""
    from llmgw.ctl.target import Given, find_target

    found: dict[str, object] = {}
    at: click.Context | None = ctx
    while at is not None:
        found = {**at.params, **found} if at.command.name == "ctl" else found
        at = at.parent

    def path(name: str) -> Path | None:
        value = found.get(name)
        return Path(str(value)).expanduser() if value else None

    plane = found.get("plane")
    options = Given(
        plane=str(plane) if plane else None, ca=path("ca"), token_file=path("token_file"), cert=path("cert")
    )
    return find_target(options, os.environ, Path.home(), path("directory"))


def run(act: Callable[[Plane], Awaitable[int | None]], *, output: str = "table") -> NoReturn:
    """Do something with the plane and leave with its exit status; errors are said in an operator's words."""
    import trio

    from llmgw.ctl.client import connected

    ctx = click.get_current_context()

    async def main() -> int | None:
        async with connected(target(ctx)) as plane:
            return await act(plane)

    try:
        status = trio.run(main)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BaseExceptionGroup as group:
        # Ctrl-C while a connection was being made comes out of that connection's nursery.
        if group.split(KeyboardInterrupt)[1] is not None:
            raise
        status = INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except LlmgwError as error:
        complain(error, output)
        status = error.exit_status
    ctx.exit(status or 0)


def complain(error: LlmgwError, output: str = "table") -> None:
    """Say an error on stderr: in words, or as the API says it."""
    if output == "json":
        import msgspec

        from llmgw.wire.apicommon import ApiError, ErrorReply

        said = ErrorReply(error=ApiError(code=error.code, message=error.what, remedy=error.remedy))
        click.echo(msgspec.json.encode(said), err=True)
    else:
        click.echo(f"llmgw ctl: {error}", err=True)


def show(
    path: str, table: Callable[[Answer, int], RenderableType], *, output: str, watch: float | None = None, **query: str
) -> NoReturn:
    """Ask one question and show its answer, once or again and again. `table` gets the answer and the width."""

    async def act(plane: Plane) -> None:
        if watch is None:
            answer = await plane.get(path, query)
            if output == "json":
                pretty(answer.data)
            else:
                from llmgw.ctl.show import console

                out = console()
                out.print(table(answer, out.width), soft_wrap=not out.is_terminal, crop=False)
        else:
            from llmgw.ctl.watch import watching

            await watching(lambda: plane.get(path, query), table, output, watch)

    run(act, output=output)


def pretty(data: bytes) -> None:
    """JSON for a program, laid out so that a person can read it as well."""
    import msgspec

    click.echo(msgspec.json.format(data, indent=2))


def done(path: str, body: object = None, *, output: str) -> NoReturn:
    """Change something and say what the plane says to it."""

    async def act(plane: Plane) -> None:
        from llmgw.wire.api import DoneReply

        answer = await plane.post(path, body)
        if output == "json":
            pretty(answer.data)
        else:
            click.echo(answer.read(DoneReply).text)

    run(act, output=output)
