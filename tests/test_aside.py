from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import pytest
import trio

from llmgw import __version__
from llmgw.aside import aside, here
from llmgw.demo.main import run
from llmgw.demo.processes import command
from llmgw.errors import BadInput, Failed
from llmgw.node import processes
from llmgw.node.mapping import Mapped, confirmed, mapped
from llmgw.rdma import fabric
from llmgw.rdma.fabric import Map
from tests.engines import until

pytestmark = pytest.mark.real


def named(module: str, name: str) -> Callable[..., bytes]:
    """What `aside` needs of a function: where it is found."""

    def stand_in(*args: bytes) -> bytes:
        raise AssertionError(f"called here with {args!r}")

    stand_in.__module__, stand_in.__qualname__ = module, name
    return stand_in


async def test_the_answer_comes_from_another_process_and_is_the_same_as_here() -> None:
    missing = msgspec.msgpack.encode({"tool": "ibnetdiscover", "exit": None, "out": "/dev/null", "err": "/dev/null"})
    there = await aside(mapped, missing, b"")
    assert there == await here(mapped, missing, b"")
    assert msgspec.msgpack.decode(there, type=Mapped).code == "not-installed"


@pytest.fixture
def namesake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """We stand in a directory that has something called as our package is, such as the one above a clone."""
    package = tmp_path / "llmgw"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this is another llmgw')")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("namesake")
async def test_what_lies_where_we_were_started_is_not_taken_for_the_package() -> None:
    missing = msgspec.msgpack.encode({"tool": "ibnetdiscover", "exit": None, "out": "/dev/null", "err": "/dev/null"})
    assert await aside(mapped, missing, b"") == await here(mapped, missing, b"")


@pytest.mark.usefixtures("namesake")
@pytest.mark.parametrize("program", ["llmgw", "llmgw-plane", "llmgw-node"])
def test_the_demo_runs_its_programs_wherever_it_was_started(program: str) -> None:
    done = subprocess.run(command(program, "--version"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, __version__ in done.stdout) == (0, "", True)


async def test_an_exception_over_there_is_told_with_its_last_words() -> None:
    with pytest.raises(Failed, match=r"mapped in a process of its own ended with exit status 1: .*MessagePack"):
        await aside(mapped, b"\xc1", b"")


async def test_only_functions_of_llmgw_are_called() -> None:
    with pytest.raises(Failed, match="os is not a part of llmgw"):
        await aside(named("os", "getpid"))


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """For a file that does not open before somebody writes into it."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


async def test_cancelling_ends_the_process_at_once(pipe: Path) -> None:
    began = time.monotonic()
    with trio.move_on_after(0.5) as scope:
        await aside(mapped, msgspec.msgpack.encode({"tool": "x", "exit": 0, "out": str(pipe), "err": "/dev/null"}), b"")
    assert scope.cancelled_caught
    assert time.monotonic() - began < 20


async def test_the_loop_goes_on_while_another_process_has_not_answered(pipe: Path) -> None:
    asked = {"tool": "ibnetdiscover", "exit": 0, "out": str(pipe), "err": "/dev/null"}

    async def write() -> None:
        await trio.to_thread.run_sync(pipe.write_text, "")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        answer = await aside(mapped, msgspec.msgpack.encode(asked), b"")
    assert answer == await here(mapped, msgspec.msgpack.encode(asked | {"out": "/dev/null"}), b"")


async def test_a_large_map_costs_the_loop_little_of_what_it_costs_here() -> None:
    packed = fabric.pack(Map(nodes=tuple(fabric.Node(guid, "host", 1) for guid in range(1, 100_000))))
    began = time.thread_time()
    answer = await aside(confirmed, packed, msgspec.msgpack.encode([]))
    loop = time.thread_time() - began
    assert answer == await here(confirmed, packed, msgspec.msgpack.encode([]))
    assert loop < (time.thread_time() - began - loop) / 2
    assert len(fabric.unpack(answer).nodes) == 99_999


async def test_an_answer_is_whole_though_its_process_was_stopped_while_it_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The write that a stop interrupts brings only a part of it across."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    packed = fabric.pack(Map(nodes=tuple(fabric.Node(guid, "host", 1) for guid in range(1, 100_000))))
    argv = [sys.executable, "-m", "llmgw.aside_child", confirmed.__module__, confirmed.__qualname__, "0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.msgpack.encode([packed, msgspec.msgpack.encode([])]))
        process.stdin.close()
        for _ in range(8):
            await until(lambda: state(process.pid) in "SZ" and unread(process.stdout) > 0)
            process.send_signal(signal.SIGSTOP)
            await until(lambda: state(process.pid) in "TZ")
            process.send_signal(signal.SIGCONT)
        answer = process.stdout.read()
    assert process.returncode == 0
    assert answer == await here(confirmed, packed, msgspec.msgpack.encode([]))


def state(pid: int) -> str:
    seen = processes.look(pid)
    return seen.state if seen is not None else "Z"


def unread(pipe: IO[bytes] | None) -> int:
    """Bytes that lie in a pipe."""
    assert pipe is not None
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


@pytest.mark.parametrize(("place", "words"), [("/etc/passwd", "is a file, where a directory is due")])
async def test_a_demo_without_a_directory_to_lie_in_is_refused(place: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        await run(once=True, directory=Path(place))
