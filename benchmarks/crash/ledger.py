"""What is true of all machines at once, which no part of the fleet can see: and what must never be.

Every engine that begins, every placement that is stored, told or routed is held against the rules of D4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs
import msgspec
import trio

from benchmarks.crash.kernel import Kernel, Process
from llmgw.plane.gateway.route import routes_of
from llmgw.plane.store.records import SHARDS, ShardRecord
from llmgw.plane.world import World
from llmgw.wire.control import ControlMessage, StartShard
from llmgw.wire.facts import NodeId, ShardId

if TYPE_CHECKING:
    from collections.abc import Callable

Attempt = tuple[ShardId, int]


@attrs.define
class Ledger:
    """Counts what happened and collects what must not have."""

    kernels: dict[str, Kernel] = attrs.field(factory=dict)
    events: int = 0
    gangs: int = 0
    duplicates: list[str] = attrs.field(factory=list)
    wrongs: list[str] = attrs.field(factory=list)
    commands: list[str] = attrs.field(factory=list)
    on_step: Callable[[Kernel, str], bool] = lambda kernel, name: False
    _stored: dict[Attempt, set[str]] = attrs.field(factory=dict)
    _homes: dict[Attempt, str] = attrs.field(factory=dict)
    _version: int = -1

    def wrong(self, what: str) -> None:
        self.wrongs.append(f"{trio.current_time():7.2f} s  {what}")

    def live(self) -> list[tuple[Kernel, Process]]:
        return [(kernel, process) for kernel in self.kernels.values() for process in kernel.engines()]

    # --- engines -----------------------------------------------------------------------------------------

    def step(self, kernel: Kernel, name: str) -> bool:
        return self.on_step(kernel, name)

    def began(self, kernel: Kernel, process: Process) -> None:
        self.events += 1
        attempt = (process.shard, process.generation)
        self.commands.append(f"began {kernel.name} {attempt}")
        if kernel.name not in self._stored.get(attempt, ()):
            self.wrong(f"{attempt} began on {kernel.name} and is stored for {self._stored.get(attempt)}")
        self._home(attempt, kernel.name, "began")
        for where, other in self.live():
            if other is process or other.shard != process.shard:
                continue
            if other.generation == process.generation or where is kernel:
                self.duplicates.append(
                    f"{trio.current_time():7.2f} s  {attempt} began on {kernel.name} while generation "
                    f"{other.generation} runs on {where.name}"
                )

    def at(self, end: str) -> tuple[Kernel, Process] | None:
        host, _, port = end.rpartition(":")
        kernel = self.kernels[host.removesuffix(".example")]
        now = trio.current_time()
        return next(((kernel, p) for p in kernel.engines() if p.port == int(port) and p.serves_at <= now), None)

    def leads(self, kernel: Kernel, process: Process) -> None:
        self.events += 1
        self.gangs += 1
        if wrong := mixed(process):
            self.wrong(f"{process.shard} generation {process.generation} leads {wrong}")

    # --- the plane ---------------------------------------------------------------------------------------

    def committed(self, puts: Mapping[str, bytes]) -> None:
        self.events += 1
        for key, value in puts.items():
            if key.startswith(SHARDS):
                record = msgspec.json.decode(value, type=ShardRecord)
                attempt = (ShardId(key.removeprefix(SHARDS)), record.generation)
                self._stored.setdefault(attempt, set()).add(record.node)

    def told(self, node: NodeId, command: ControlMessage) -> None:
        self.events += 1
        self.commands.append(f"{trio.current_time():.3f} {node} {command}")
        if isinstance(command, StartShard):
            attempt = (command.shard, command.generation)
            if node not in self._stored.get(attempt, ()):
                self.wrong(f"{attempt} was told to {node} and is stored for {self._stored.get(attempt)}")
            self._home(attempt, node, "was told")

    def world(self, world: World) -> None:
        """Called with each new world of the plane that leads."""
        if world.version == self._version:
            return
        self._version = world.version
        self.events += 1
        by_shard = {(kernel.name, p.shard): p for kernel, p in self.live()}
        by_port = {(f"{kernel.name}.example", p.port): p for kernel, p in self.live()}
        for shard in world.shards.values():
            self._home((shard.id, shard.generation), shard.node, "is placed")
        routed: dict[str, int] = {}
        for route in routes_of(world).models.values():
            for endpoint in route.endpoints:
                routed[endpoint.replica] = routed.get(endpoint.replica, 0) + 1
                process = by_port.get((endpoint.host, endpoint.port))
                if process is not None:
                    claim = world.shards.get(process.shard)
                    if claim is None or claim.replica != endpoint.replica or claim.generation != process.generation:
                        self.wrong(f"{process.shard} generation {process.generation} is routed to and must not be")
                    if wrong := mixed(process):
                        self.wrong(f"{process.shard} is routed to and leads {wrong}")
                self._whole(world, endpoint.replica, by_shard)
        for replica, count in routed.items():
            if count > 1:
                self.duplicates.append(f"{trio.current_time():7.2f} s  {replica} is routed to {count} times")

    def _whole(self, world: World, replica: str, live: Mapping[tuple[str, ShardId], Process]) -> None:
        """What is routed to is one attempt on all its nodes: a member may have died just now, but is no other one."""
        members = [shard for shard in world.shards.values() if shard.replica == replica]
        if len({member.generation for member in members}) > 1 or len(members) != max(1, len(members[0].spec.peers)):
            self.wrong(f"{replica} is routed to and is {[(m.id, m.generation) for m in members]}")
        for member in members:
            process = live.get((member.node, member.id))
            if process is not None and process.generation != member.generation:
                self.wrong(f"{replica} is routed to and {member.id} runs at generation {process.generation}")

    def _home(self, attempt: Attempt, node: str, how: str) -> None:
        home = self._homes.setdefault(attempt, node)
        if home != node:
            self.wrong(f"{attempt} belongs to {home} and {how} on {node}")


def mixed(leader: Process) -> str:
    """What a leader leads that is not of its own attempt; "" when all of it is."""
    replica = leader.shard.rpartition("-")[0]
    others = [
        f"{peer.shard} generation {peer.generation}"
        for rank, peer in enumerate(leader.led, 1)
        if (peer.shard, peer.generation) != (f"{replica}-{rank}", leader.generation)
    ]
    return ", ".join(others)


def orphans(ledger: Ledger, world: World) -> Iterable[str]:
    """Engines that run although no placement claims them."""
    for kernel, process in ledger.live():
        shard = world.shards.get(process.shard)
        if shard is None or (shard.node, shard.generation) != (kernel.name, process.generation):
            yield f"{process.shard} generation {process.generation} on {kernel.name}"
