"""Planes and agents of several versions in one fleet: processes as they are shipped, mutual TLS, a real engine."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from llmgw.demo.processes import command
from tests.e2e.rig import WITHIN, Rig
from tests.ports import free_ports
from tests.upgrade.releases import PRESENT, Release


@attrs.define
class Mixed(Rig):
    """A fleet in which whatever is started next is of the release `speaks`."""

    #: As shipped: a node that waits a moment longer before it dials again must not be lost for that.
    settings: str = ""
    speaks: Release = PRESENT

    @property
    def env(self) -> dict[str, str]:
        return super().env | self.speaks.env

    async def plane_of(self, release: Release) -> None:
        """Start this release's plane; afterwards the nodes are connected again that were."""
        self.speaks = release
        await self.start_plane()
        for name in self.nodes:
            await self.connected(name)

    async def node_of(self, name: str, release: Release) -> None:
        """Join, if it is not yet of the fleet, and start this release's agent."""
        self.speaks = release
        if not (self.root / name / "node.toml").exists():
            await self.join(name)
        await self.start_node(name)
        await self.connected(name, release.version)

    async def connected(self, name: str, version: str = "") -> None:
        async def there() -> bool:
            row = await self.node(name)
            return bool(row["connected"]) and version in ("", row["version"])

        await self.until(there, what=f"{name} is connected {version and 'by ' + version}")

    async def stop_node(self, name: str, number: signal.Signals = signal.SIGTERM) -> None:
        await self.kill(self.nodes[name], number)

    async def stop_plane(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.plane is not None
        await self.kill(self.plane, number)

    async def serving(self) -> dict[str, tuple[str, int, int]]:
        """Of each shard: where it is, its generation, its process."""
        return {id: (shard["node"], shard["generation"], shard["pid"]) for id, shard in (await self.shards()).items()}

    def ended(self, release: Release, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with its words and status."""
        self.speaks = release
        argv = command(program, *words)
        return subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=WITHIN, check=False)

    async def post(self, path: str, body: Any = None) -> Any:
        answer = await self.api.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()


@asynccontextmanager
async def mixed(root: Path, plane: Release, agents: Sequence[Release], *, replicas: int = 0) -> AsyncIterator[Mixed]:
    """A running fleet of these versions: nodes n1, n2, ..."""
    agents_port, admin, serve = free_ports(3)
    made = Mixed(root, agents_port, admin, serve, str(root), speaks=plane)
    try:
        await made.make_plane()
        await made.start_plane()
        for n, release in enumerate(agents, 1):
            await made.node_of(f"n{n}", release)
        if replicas:
            await made.apply(replicas)
            await made.until(lambda: made.ready(replicas), what=f"{replicas} replicas ready")
        yield made
    finally:
        with trio.CancelScope(shield=True):
            await made.down()
