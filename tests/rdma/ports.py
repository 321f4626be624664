"""Ports and GIDs as nodes report them, for tests of pairing, links and grades."""

from __future__ import annotations

import msgspec

from llmgw.wire.facts import Gid, Gpu, Port

V1, V2 = "IB/RoCE v1", "RoCE v2"


def gid(index: int, address: str, type: str = V2, netdev: str = "") -> Gid:
    if ":" not in address:
        address = f"::ffff:{address}"
    return Gid(index, address, type, netdev)


def roce(device: str = "mlx5_0", *addresses: str, **more: object) -> Port:
    """A RoCE port that is up at 100 Gb/s with a link-local GID, then the given IPv4 addresses."""
    netdev = f"eth_{device}"
    table = [gid(0, "fe80::1", V1, netdev), gid(1, "fe80::1", V2, netdev)]
    for address in addresses or ("10.0.0.1",):
        table += [gid(len(table), address, V1, netdev), gid(len(table) + 1, address, V2, netdev)]
    port = Port(
        device=device,
        kind="roce",
        state="ACTIVE",
        physical_state="LinkUp",
        rate_gbps=100.0,
        link_layer="Ethernet",
        netdev=netdev,
        mtu=4096,
        gids=tuple(table),
    )
    return msgspec.structs.replace(port, **more)


def ib(device: str = "mlx5_0", **more: object) -> Port:
    """An InfiniBand port that is up at 400 Gb/s."""
    port = Port(
        device=device,
        kind="ib",
        state="ACTIVE",
        physical_state="LinkUp",
        rate_gbps=400.0,
        link_layer="InfiniBand",
        lid=5,
        sm_lid=1,
        mtu=4096,
    )
    return msgspec.structs.replace(port, **more)


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(uuid=f"GPU-{at}", index=at, pci=f"0000:{at + 16:02x}:00.0") for at in range(count))
