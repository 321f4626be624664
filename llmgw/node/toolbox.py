"""perftest on this node: installed on first use where that is permitted (E4), its version and options asked once.

An installation is not a request's child: a package manager that is killed half-way leaves a broken machine, so it runs
in the daemon's own `run` and requests only wait for it.
"""

from __future__ import annotations

import os
import shutil

import structlog
import trio

from llmgw.errors import Failed
from llmgw.node.engines.environment import PROBE
from llmgw.node.run import NotStarted, Ran, run
from llmgw.rdma import perftest
from llmgw.rdma.command import Tools

log = structlog.get_logger("llmgw.perftest")

#: Seconds that an installation may take, package lists included.
INSTALL_WITHIN = 300.0
#: Seconds for the program to say its version, and again for its options.
ASK_WITHIN = 20.0


class Toolbox:
    """The perftest that this node has, or can get."""

    def __init__(self, *, may_install: bool = True) -> None:
        self._may_install = may_install
        self._asked = trio.Event()
        self._done = trio.Event()
        self._problem = ""
        self._tools: tuple[str, Tools] | None = None

    @property
    def missing(self) -> bool:
        return shutil.which("ib_write_bw") is None

    def why_not(self) -> str:
        """Why perftest may not be installed here, with what to do; "" when it may."""
        by_hand = "perftest is not installed; install it by hand (apt-get install perftest, or dnf install perftest)"
        if not self._may_install:
            return f"{by_hand}: this agent's settings do not let it install"
        if os.geteuid() != 0:
            return f"{by_hand}: this agent does not run as root"
        if not shutil.which("apt-get") and not shutil.which("dnf"):
            return f"{by_hand}: this machine has neither apt nor dnf"
        return ""

    async def installed(self) -> str:
        """Wait for the installation, beginning it when nobody has; why it failed, or ""."""
        if not self._asked.is_set():
            self._done = trio.Event()
            self._asked.set()
        await self._done.wait()
        return self._problem

    async def run(self) -> None:
        """Install when asked, in the daemon's nursery: no stream's end cuts an installation short."""
        while True:
            await self._asked.wait()
            with trio.CancelScope(shield=True):
                self._problem = await self._install()
            self._asked = trio.Event()
            self._done.set()

    async def _install(self) -> str:
        if shutil.which("apt-get"):
            apt = ("apt-get", "-y", "-o", "DPkg::Lock::Timeout=60")
            steps = [(*apt, "update"), (*apt, "install", "--no-install-recommends", "perftest")]
        else:
            steps = [("dnf", "-y", "install", "perftest")]
        log.info("installing perftest", steps=len(steps))
        last: Ran | None = None
        for step in steps:
            try:
                # Unmarked: a package manager that is killed in the middle leaves its database in pieces.
                env = {"DEBIAN_FRONTEND": "noninteractive", PROBE: ""}
                last = await run(step, limit=INSTALL_WITHIN / len(steps), env=env)
            except NotStarted as error:
                return str(error)
        if shutil.which("ib_write_bw"):
            log.info("perftest installed")
            return ""
        words = (last.stderr or last.stdout).strip().splitlines()[-1:] if last else []
        return f"perftest could not be installed: {words[0] if words else 'the package manager says nothing'}"

    async def tools(self) -> Tools:
        """Version and options of what is installed, asked of the program once."""
        path = shutil.which("ib_write_bw") or ""
        try:
            key = f"{path} {os.stat(path).st_mtime_ns}" if path else ""
        except OSError:
            key = ""
        if not key:
            raise Failed("perftest is not installed", remedy="apt-get install perftest, or dnf install perftest")
        if self._tools is None or self._tools[0] != key:
            # Both leave with 1, so only what they print counts.
            version = await run([path, "--version"], limit=ASK_WITHIN)
            options = await run([path, "--help"], limit=ASK_WITHIN)
            has = {name: shutil.which(name) is not None for name in ("stdbuf", "numactl", "taskset")}
            found = Tools(
                perftest.version(version.stdout + version.stderr),
                perftest.options(options.stdout + options.stderr),
                **has,
            )
            if version.cut_short or options.cut_short:
                return found  # what is not known now may be known the next time
            self._tools = (key, found)
        return self._tools[1]
