"""Shared by tests of replicas of several nodes: agents' shards side by side on this machine, and orders for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from llmgw.node.health import Patience
from llmgw.tinymodel import write_tiny
from llmgw.wire.control import StartShard
from llmgw.wire.facts import ModelName, ReplicaId, Resources, ShardId, ShardSpec
from tests.engines import Watching, running, shards
from tests.ports import free_ports

REPLICA = ReplicaId("six-0")


@cache
def six_layers() -> Path:
    """A model with layers enough for three members."""
    return write_tiny(Path(mkdtemp(prefix="llmgw-test-model-")) / "six.gguf", layers=6)


def shard(rank: int) -> ShardId:
    return ShardId(f"{REPLICA}-{rank}")


def orders(
    members: int = 2,
    generation: int = 1,
    *,
    ports: Sequence[int] | None = None,
    args: Sequence[str] = (),
    ready_within: float = 60.0,
) -> tuple[StartShard, ...]:
    """What the plane tells each member of a llama.cpp replica, by rank."""
    numbers = ports or free_ports(members - 1)
    given: tuple[dict[str, int], ...] = ({}, *({"rpc": number} for number in numbers))
    return tuple(
        StartShard(
            shard=shard(rank),
            replica=REPLICA,
            model=ModelName("six"),
            generation=generation,
            spec=ShardSpec(
                engine="llamacpp",
                model=ModelName("six"),
                source=str(six_layers()),
                args=tuple(args) if not rank else (),
                resources=Resources(cpu_threads=1),
                context=512,
                rank=rank,
                peers=("127.0.0.1",) * members,
                ports=given[rank],
                peer_ports=given,
                grace=5.0,
                ready_within=ready_within,
            ),
        )
        for rank in range(members)
    )


@asynccontextmanager
async def agents(folder: Path, members: int = 2, patience: Patience | None = None) -> AsyncIterator[list[Watching]]:
    """As many nodes as a replica has members, by rank, each with a state of its own."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(running(shards(folder / f"node-{rank}", patience=patience)))
            for rank in range(members)
        ]
