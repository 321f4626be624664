"""The first frame of a node that has much (A3)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs

from llmgw.node.lean import lean
from llmgw.wire.agent import Register, ShardStatus
from llmgw.wire.codec import MOST_BYTES_STRANGER, encode
from llmgw.wire.facts import (
    Gid,
    Gpu,
    Grade,
    Host,
    Interface,
    ModelName,
    NodeId,
    Port,
    Problem,
    ReplicaId,
    ShardId,
    ShardState,
    Weights,
)


def status() -> ShardStatus:
    return ShardStatus(
        shard=ShardId("m-0-0"), replica=ReplicaId("m-0"), model=ModelName("m"), generation=1, state=ShardState.READY
    )


def test_a_register_past_the_first_frames_limit_is_told_in_two() -> None:
    gids = tuple(Gid(n, f"fe80:0000:0000:0000:0000:0000:0000:{n:04x}", "RoCE v2", "eth0") for n in range(256))
    whole = Register(
        node=NodeId("n1"),
        version="0.1.0",
        ports=tuple(Port(device=f"mlx5_{n}", gids=gids) for n in range(16)),
        weights=tuple(Weights(source=f"hf://org/{n}") for n in range(500)),
    )
    register, later = lean(whole)
    assert len(encode(register)) <= MOST_BYTES_STRANGER < len(encode(whole))
    assert [port.device for port in register.ports] == [port.device for port in whole.ports]
    assert later is whole
    small = structs.replace(whole, ports=(), weights=())
    assert lean(small) == (small, None)


@pytest.mark.parametrize(
    "crowd",
    [
        lambda r: structs.replace(r, host=Host(interfaces=tuple(Interface(name=f"veth{n}" * 20) for n in range(3000)))),
        lambda r: structs.replace(r, gpus=tuple(Gpu(uuid=f"GPU-{n}" * 10, index=n) for n in range(1000))),
        lambda r: structs.replace(r, ports=tuple(Port(device=f"mlx5_{n}" * 50) for n in range(1000))),
        lambda r: structs.replace(
            r,
            problems=tuple(Problem(subject="node", code=f"c{n}" * 40, grade=Grade.WARN, text="") for n in range(1000)),
        ),
        lambda r: structs.replace(r, labels={f"label{n}": "x" * 100 for n in range(1000)}),
        lambda r: structs.replace(
            r,
            shards=tuple(
                structs.replace(status(), shard=ShardId(f"m-{n}"), lines=("x" * 500,) * 20, detail="d" * 500)
                for n in range(200)
            ),
        ),
    ],
)
def test_whatever_a_node_has_too_much_of_its_first_frame_is_accepted_and_tells_every_shard(
    crowd: Callable[[Register], Register],
) -> None:
    whole = crowd(Register(node=NodeId("n1"), version="0.1.0", shards=(status(),), epoch=7))
    assert len(encode(whole)) > MOST_BYTES_STRANGER
    register, later = lean(whole)
    assert len(encode(register)) <= MOST_BYTES_STRANGER
    assert [told.shard for told in register.shards] == [told.shard for told in whole.shards]
    assert (register.node, register.epoch) == (whole.node, whole.epoch)
    assert later is whole
