"""`--watch`: the same question again and again, until Ctrl-C, over every loss of the plane."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import click
import trio
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from llmgw.ctl.client import Answer
from llmgw.ctl.running import complain
from llmgw.ctl.show import console, when
from llmgw.errors import LlmgwError, TimedOut, Unavailable

Ask = Callable[[], Awaitable[Answer]]
Paint = Callable[[Answer, int], RenderableType]


async def watching(ask: Ask, paint: Paint, output: str, seconds: float) -> None:
    """Ask and show for ever. A plane that does not answer is said so and asked again; other errors are raised."""
    with while_read():
        if output == "json":
            await _lines(ask, seconds)
        elif console().is_terminal:
            await _screen(ask, paint, seconds)
        else:
            await _pages(ask, paint, seconds)


@contextmanager
def while_read() -> Iterator[None]:
    """The block, ended when nobody reads our output any more: else `events -f | grep -m 1 lost` waits for one more."""
    with trio.CancelScope() as scope:
        trio.lowlevel.spawn_system_task(_unread, scope)
        yield


async def _unread(scope: trio.CancelScope) -> None:
    try:
        handle = sys.stdout.fileno()
        if not stat.S_ISFIFO(os.fstat(handle).st_mode):
            return
    except (OSError, ValueError):
        return  # closed, or no file at all
    # Of a pipe's end that is written the kernel tells nothing but that the other end is gone.
    await trio.lowlevel.wait_readable(handle)
    scope.cancel()


async def _lines(ask: Ask, seconds: float) -> None:
    while True:
        try:
            click.echo((await ask()).data)
        except (Unavailable, TimedOut) as error:
            complain(error, "json")
        await trio.sleep(seconds)


async def _pages(ask: Ask, paint: Paint, seconds: float) -> None:
    out = console()
    while True:
        try:
            out.print(paint(await ask(), out.width), soft_wrap=True)
            out.print()
        except (Unavailable, TimedOut) as error:
            complain(error)
        await trio.sleep(seconds)


async def _screen(ask: Ask, paint: Paint, seconds: float) -> None:
    import time

    out = console()
    last: tuple[float, Answer] | None = None
    since: float | None = None
    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            try:
                last, since, problem = (time.time(), await ask()), None, None
            except (Unavailable, TimedOut) as error:
                since, problem = since or time.time(), error
            live.update(_painted(paint, out.width, last, since, problem), refresh=True)
            await trio.sleep(seconds)


def _painted(
    paint: Paint, width: int, last: tuple[float, Answer] | None, since: float | None, problem: LlmgwError | None
) -> RenderableType:
    """The last good answer, and honestly how old it is when there is no newer one."""
    head = Text(f"{when(last[0])}  every few seconds; Ctrl-C ends" if last else "", style="dim")
    if problem is not None:
        head = Text(f"not answering since {when(since)}: {problem.what}", style="bold red")
        if last is not None:
            head.append(f"\nwhat you see is of {when(last[0])}", style="red")
    return Group(head, Text(""), paint(last[1], width)) if last else head
