"""Boots the two guests, runs commands in them, and breaks what is between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import DEVNULL

import attrs
import pytest
import trio

from tests.ports import free_ports
from tests.rigs.roce.image import Image, image

#: Marks for a test in guests. Whichever is the first waits for them to boot, and for their agents.
IN_GUESTS = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]

RAILS = 2
#: Seconds after which a guest is ended, whatever happens to the tests.
LIFE = 4 * 3600
#: Seconds that two guests may take to boot, emulated on a machine that is busy with other things.
BOOT_WITHIN = 900.0
#: Seconds for Python with our modules to start in a guest, and to do something: half a minute where nothing else runs.
START = 300.0
#: Seconds for a killed process to end. What nobody has killed lives for longer: its limit is at least 49 s.
ENDS_WITHIN = 30.0


@attrs.frozen
class Done:
    """How a command in a guest ended."""

    exit_code: int
    stdout: str
    stderr: str

    def ok(self) -> str:
        """What it printed; the test fails when it failed."""
        assert self.exit_code == 0, f"exit code {self.exit_code}: {self.stderr or self.stdout}"
        return self.stdout


@attrs.frozen
class Guest:
    """One guest. `number` ends its addresses: 192.168.100.NUMBER on the first rail, 192.168.101. on the second."""

    name: str
    number: int
    port: int
    directory: Path

    @property
    def share(self) -> Path:
        """A folder that the guest sees as /share."""
        return self.directory / "share"

    def address(self, rail: int) -> str:
        return f"192.168.{100 + rail}.{self.number}"

    async def run(self, *command: str, env: Mapping[str, str] | None = None) -> Done:
        """Run a command to its end; leaving before that kills it. The caller owns the deadline."""
        async with await trio.open_tcp_stream("127.0.0.1", self.port) as stream:
            asked = {"command": list(command), "env": dict(env or {})}
            await stream.send_all(json.dumps(asked).encode() + b"\n")
            data = b""
            while not data.endswith(b"\n"):
                piece = await stream.receive_some(65536)
                if not piece:
                    raise ConnectionError(f"{self.name} said nothing: {self.console()}")
                data += piece
        return Done(**json.loads(data))

    async def sh(self, script: str) -> str:
        """A shell script's output; the test fails when it fails."""
        return (await self.run("sh", "-ec", script)).ok()

    async def link(self, rail: int, up: bool) -> None:
        """Plug a rail's cable in or pull it out, as the guest's adapter sees it."""
        stream = await trio.open_unix_socket(str(self.directory / "qmp"))
        async with stream:
            for order in (
                {"execute": "qmp_capabilities"},
                {"execute": "set_link", "arguments": {"name": f"rail{rail}", "up": up}},
            ):
                await stream.send_all(json.dumps(order).encode() + b"\n")
                data = b""
                # The greeting, then an answer to each order; events may come between.
                while b'"return"' not in data:
                    piece = await stream.receive_some(4096)
                    assert piece, data
                    assert b'"error"' not in data, data
                    data += piece

    async def no_perftest(self) -> None:
        """Wait until no ib_write_bw runs in the guest: one that was killed ends a moment later."""
        with trio.fail_after(ENDS_WITHIN):
            await self.sh("while pgrep -x ib_write_bw; do sleep 0.1; done")

    def console(self) -> str:
        """The end of what the guest's kernel and first process said."""
        console = self.directory / "console"
        return console.read_text(errors="replace")[-2000:] if console.exists() else ""


def acceleration() -> tuple[str, str]:
    """QEMU's accelerator and CPU: KVM only where the CPU itself runs guests, emulation everywhere else."""
    modules = {path.name for path in Path("/sys/module").glob("kvm_*")}
    if os.access("/dev/kvm", os.R_OK | os.W_OK) and modules & {"kvm_intel", "kvm_amd"}:
        return "kvm", "host"
    return "tcg,thread=multi", "max"


def _command(guest: Guest, other: int, made: Image, mtu: int, speed: int) -> list[str]:
    accelerator, cpu = acceleration()
    settings = {
        "host": guest.name, "number": guest.number, "rails": RAILS, "mtu": mtu,
        # With -S and without a virtual environment Python starts in a tenth of the time.
        "python": Path(sys.executable).resolve(),
    }  # fmt: skip
    kernel = [
        "console=ttyS0 panic=-1 quiet loglevel=3 nokaslr mitigations=off random.trust_cpu=on",
        # Without these an emulated guest takes the slow timer, and perftest cannot calibrate its clock on it.
        "tsc=reliable clocksource=tsc",
        *(f"guest.{name}={value}" for name, value in settings.items()),
    ]
    command = [
        "timeout", "-k", "5", str(LIFE), "qemu-system-x86_64", "-machine", "q35", "-accel", accelerator, "-cpu", cpu,
        "-m", "768", "-smp", "1", "-display", "none", "-no-reboot", "-nodefaults", "-no-user-config",
        "-serial", f"file:{guest.directory}/console", "-qmp", f"unix:{guest.directory}/qmp,server=on,wait=off",
        "-kernel", str(made.kernel), "-initrd", str(made.initrd), "-append", " ".join(kernel),
        "-device", "virtio-rng-pci",
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
        "-fsdev", f"local,id=share,path={guest.share},security_model=none",
        "-device", "virtio-9p-pci,fsdev=share,mount_tag=share",
        "-netdev", f"user,id=out,ipv6=off,hostfwd=tcp:127.0.0.1:{guest.port}-:5555",
        "-device", f"virtio-net-pci,netdev=out,mac=52:54:00:00:00:{guest.number:02x}",
    ]  # fmt: skip
    for rail in range(RAILS):
        # A pair of datagram sockets: neither end has to be there first.
        ours, theirs = (guest.directory.parent / f"rail{rail}.{number}" for number in (guest.number, other))
        command += [
            "-netdev", f"dgram,id=rail{rail},local.type=unix,local.path={ours},remote.type=unix,remote.path={theirs}",
            "-device", f"virtio-net-pci,netdev=rail{rail},mac=52:54:00:{rail + 1:02x}:00:{guest.number:02x},"
            f"host_mtu={mtu},speed={speed},duplex=full,csum=off,gso=off",
        ]  # fmt: skip
    return command


@contextmanager
def guests(*, mtu: int = 4300, speed: int = 25_000) -> Iterator[tuple[Guest, Guest]]:
    """Two running guests, a and b; they are gone when the block ends. Raises CannotBuild.

    Not async, so that all tests of a session can have the same two.
    """
    made = image()
    ports = free_ports(2)
    # A short path: names of UNIX sockets have 108 bytes.
    home = Path(tempfile.mkdtemp(prefix="roce-", dir="/tmp"))
    a, b = (Guest(*who, port, home / who[0]) for who, port in zip((("a", 11), ("b", 12)), ports, strict=True))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for guest, other in ((a, b), (b, a)):
            guest.share.mkdir(parents=True)
            with (guest.directory / "qemu.log").open("wb") as log:
                command = _command(guest, other.number, made, mtu, speed)
                processes.append(
                    subprocess.Popen(command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True)
                )
        for guest, process in zip((a, b), processes, strict=True):
            _wait(guest, process)
        yield a, b
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # `timeout` and its QEMU; nothing in a guest outlives it
        for process in processes:
            process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _wait(guest: Guest, process: subprocess.Popen[bytes]) -> None:
    """Until a guest takes commands."""
    began = time.monotonic()
    while time.monotonic() - began < BOOT_WITHIN and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", guest.port), timeout=10) as probe:
                probe.sendall(b'{"command": ["true"]}\n')
                if probe.recv(4096).startswith(b"{"):
                    return
        except OSError:
            pass
        time.sleep(0.2)
    log = (guest.directory / "qemu.log").read_text(errors="replace")[-1000:]
    raise AssertionError(f"guest {guest.name} did not come up: {log}\n{guest.console()}")
