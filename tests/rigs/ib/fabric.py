"""A fabric that lives while its block runs: the simulator, subnet managers, and faults on demand.

    with Fabric(fat_tree(16, 2, radix=8), directory) as fabric:
        fabric.manager(fabric.net.host(0), priority=14)
        fabric.cut(leaf, 6)
        ran = fabric.tool(host, "ibnetdiscover")

Each tool runs in a directory of its own, since the preload leaves files where it stands, and under a limit, since
it waits for ever when no simulator answers. The simulator serves ten clients at once, managers included.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from llmgw.rdma.ran import Ran
from tests.rigs.ib.net import Box, Net
from tests.rigs.ib.tools import PRELOAD, real

Tick = Callable[[], bool]


def until(done: Tick, what: str, within: float = 120.0) -> None:
    """Ask again and again, every 20 ms, until it is so."""
    deadline = time.monotonic() + within
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within:.0f} s: {what}")
        time.sleep(0.02)


class Manager:
    """One opensm process at one port."""

    def __init__(self, fabric: Fabric, at: Box, priority: int, poll_ms: int, sweep: int) -> None:
        self.at = at
        self.guid = f"{at.port_guid:016x}"
        self.directory = fabric.directory / f"sm-{at.id}"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        (self.directory / "opensm.conf").write_text(
            f"guid 0x{at.port_guid:x}\nsm_priority {priority}\nsminfo_polling_timeout {poll_ms}\n"
            f"polling_retry_number 2\nsweep_interval {sweep}\nlog_flags 0x03\nforce_log_flush TRUE\n"
        )
        environment = fabric.environment(at) | {
            "OSM_CACHE_DIR": str(self.directory),
            "OSM_TMP_DIR": str(self.directory),
        }
        with open(self.directory / "stdout", "wb") as out:
            self.process = subprocess.Popen(
                [real("opensm"), "-F", "opensm.conf", "-f", "opensm.log", "--console", "off", "-e"],
                cwd=self.directory, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def log(self) -> str:
        with suppress(FileNotFoundError):
            return (self.directory / "opensm.log").read_text(errors="replace")
        return ""

    def wait_for(self, words: str, within: float = 120.0, *, times: int = 1) -> None:
        """Wait until the log has said this so often."""

        def said() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"opensm ended with {self.process.returncode}: {self.log[-500:]}")
            return self.log.count(words) >= times

        until(said, f"{words!r} in the log of opensm at {self.at.name}", within)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
            if number is signal.SIGTERM:
                # A stopped one could not end.
                self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Fabric:
    """One simulated fabric."""

    def __init__(self, net: Net, directory: Path, name: str = "") -> None:
        self.net = net
        self.name = name or f"llmgw-{os.getpid()}-{id(self):x}"
        self.directory = directory / self.name
        self.managers: list[Manager] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Fabric:
        self.directory.mkdir(parents=True)
        path, self._log = self.directory / "fabric.net", self.directory / "ibsim.log"
        path.write_text(self.net.text())
        with open(self._log, "wb") as out:
            self._process = subprocess.Popen(
                [real("ibsim"), "-s", *self.net.limits(), str(path)], cwd=self.directory, stdin=subprocess.PIPE,
                stdout=out, stderr=subprocess.STDOUT, env=os.environ | {"IBSIM_SOCKNAME": self.name},
            )  # fmt: skip
        try:
            until(self._ready, "the simulator's start", 300)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for manager in self.managers:
            manager.end(signal.SIGKILL)
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.terminate()
        with suppress(OSError):
            self._console.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _console(self) -> IO[bytes]:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"ibsim ended: {self._log.read_text(errors='replace')[-800:]}")
        return b"Network simulator ready" in self._log.read_bytes()

    def environment(self, host: Box) -> dict[str, str]:
        """What makes a tool a client of this simulator, at this port."""
        return os.environ | {"LD_PRELOAD": PRELOAD, "SIM_HOST": host.id, "IBSIM_SOCKNAME": self.name, "LC_ALL": "C"}

    def manager(self, at: Box, priority: int = 0, *, poll_ms: int = 1000, sweep: int = 5) -> Manager:
        """Start a subnet manager."""
        one = Manager(self, at, priority, poll_ms, sweep)
        self.managers.append(one)
        return one

    def tool(self, host: Box, *argv: str, within: float = 120.0) -> Ran:
        """Run a real tool at one port."""
        with tempfile.TemporaryDirectory(prefix="tool-", dir=self.directory, ignore_cleanup_errors=True) as place:
            began = time.monotonic()
            try:
                done = subprocess.run(
                    [real(argv[0]), *argv[1:]], cwd=place, env=self.environment(host), capture_output=True,
                    timeout=within, stdin=subprocess.DEVNULL, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired as error:
                out, err = (error.stdout or b"").decode(), (error.stderr or b"").decode()
                return Ran(argv[0], -9, out, err, within, timed_out=True, argv=argv)
            return Ran(
                argv[0], done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"),
                time.monotonic() - began, argv=argv,
            )  # fmt: skip

    def console(self, *lines: str) -> None:
        """Commands to the simulator, done when this returns: it answers them in order, so a marker is asked last."""
        marker = self._log.read_bytes().count(b"# Net status")
        for line in (*lines, f'Dump "{self.net.boxes[0].id}"'):
            assert len(line) < 127, "the simulator's console takes no longer lines"
            self._console.write(line.encode() + b"\n")
        self._console.flush()
        until(lambda: self._log.read_bytes().count(b"# Net status") > marker, f"the simulator to do {lines}", 120)

    def cut(self, box: Box, port: int | None = None) -> None:
        """Pull one cable, or all of a box."""
        self.console(f'Unlink "{box.id}"' + ("" if port is None else f"[{port}]"))

    def heal(self, box: Box, port: int | None = None) -> None:
        self.console(f'ReLink "{box.id}"' + ("" if port is None else f"[{port}]"))

    def swap(self, one: Box, port: int, other: Box, other_port: int) -> None:
        """Exchange what is plugged into two ports."""
        first, first_port, _ = one.cables[port]
        second, second_port, _ = other.cables[other_port]
        self.console(
            f'Unlink "{one.id}"[{port}]', f'Unlink "{other.id}"[{other_port}]',
            f'Link "{one.id}"[{port}] "{second.id}"[{second_port}]',
            f'Link "{other.id}"[{other_port}] "{first.id}"[{first_port}]',
        )  # fmt: skip

    def drop(self, box: Box, percent: int) -> None:
        """Let a box lose so many of the management packets sent to it; 100 is silence, 0 heals."""
        self.console(f'Error "{box.id}" {percent}')

    def count(self, box: Box, port: int, **counters: int) -> None:
        """Set error counters of one port."""
        self.console(
            *(f'PerformanceSet "{box.id}"[{port}] PortCounters.{name}={value}' for name, value in counters.items())
        )

    def replace(self, box: Box, guid: int) -> None:
        """Another adapter in the same place; the simulator's own name for it stays."""
        self.console(
            f'Unlink "{box.id}"',
            f'Guid "{box.id}" 0x{guid:x}',
            f'Guid "{box.id}"[1] 0x{guid + 1:x}',
            f'ReLink "{box.id}"',
        )
