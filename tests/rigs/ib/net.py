"""Fat trees in the text that ibsim reads, which is also what ibnetdiscover prints.

Rail-optimised: adapter r of every host of a group is cabled to the group's leaf r. Two levels when they
are enough, else pods with cores above. Node ids are "H-<guid>" and "S-<guid>", so that what a tool
reports goes back to the simulator's console as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs


def host_guid(host: int, rail: int) -> int:
    """An adapter's GUID; its port's is one more."""
    return 0x946DAE0300000000 | host << 12 | rail << 8


def switch_guid(plane: int, level: int, index: int) -> int:
    return 0xB0CF0E0000000000 | plane << 32 | level << 28 | index << 8


def host_id(host: int, rail: int = 0) -> str:
    return f"H-{host_guid(host, rail):016x}"


@attrs.define
class Box:
    """A switch or an adapter, and its cables: (peer, its port, "4xHDR") by port."""

    kind: str
    guid: int
    ports: int
    name: str
    device: int
    system: int
    cables: dict[int, tuple[Box, int, str]] = attrs.field(factory=dict, repr=False)

    @property
    def id(self) -> str:
        return f"{self.kind}-{self.guid:016x}"

    @property
    def port_guid(self) -> int:
        """The port GUID of a switch, or of an adapter's first port."""
        return self.guid if self.kind == "S" else self.guid + 1


@attrs.define
class Net:
    """A fabric on paper."""

    boxes: list[Box] = attrs.field(factory=list)
    rails: int = 0

    def add(self, kind: str, guid: int, ports: int, name: str, device: int, system: int | None = None) -> Box:
        box = Box(kind, guid, ports, name, device, guid if system is None else system)
        self.boxes.append(box)
        return box

    def cable(self, one: Box, port: int, other: Box, other_port: int, pace: str) -> None:
        assert not {port} & one.cables.keys(), f"port {port} of {one.name} is taken"
        assert not {other_port} & other.cables.keys(), f"port {other_port} of {other.name} is taken"
        one.cables[port] = (other, other_port, pace)
        other.cables[other_port] = (one, port, pace)

    @property
    def switches(self) -> list[Box]:
        return [box for box in self.boxes if box.kind == "S"]

    @property
    def leaves(self) -> list[Box]:
        return [box for box in self.switches if box.name.startswith("MF0;leaf")]

    @property
    def spines(self) -> list[Box]:
        return [box for box in self.switches if box.name.startswith("MF0;spine")]

    @property
    def hosts(self) -> list[Box]:
        return [box for box in self.boxes if box.kind == "H" and box.device != 0xCF09]

    def host(self, host: int, rail: int = 0) -> Box:
        guid = host_guid(host, rail)
        return next(box for box in self.boxes if box.guid == guid)

    def limits(self) -> list[str]:
        """ibsim's size switches, for nets over its defaults."""
        ports = sum(box.ports + (box.kind == "S") for box in self.boxes)
        if len(self.boxes) < 2000 and len(self.switches) < 250 and ports < 13000:
            return []
        return [
            "-N",
            str(len(self.boxes) + 64),
            "-S",
            str(len(self.switches) + 64),
            "-P",
            str(ports + 256),
            "-L",
            "49152",
        ]

    def lines(self) -> Iterator[str]:
        for box in self.boxes:
            yield f"vendid=0x2c9\ndevid=0x{box.device:x}\nsysimgguid=0x{box.system:x}"
            if box.kind == "S":
                yield f"switchguid=0x{box.guid:x}({box.guid:x})"
                yield f'Switch\t{box.ports} "{box.id}"\t\t# "{box.name}" enhanced port 0 lid 0 lmc 0'
            else:
                yield f"caguid=0x{box.guid:x}"
                yield f'Ca\t{box.ports} "{box.id}"\t\t# "{box.name}"'
            for port in sorted(box.cables):
                peer, peer_port, pace = box.cables[port]
                there = f'"{peer.id}"[{peer_port}]'
                own = f"({peer.guid + peer_port:x}) " if peer.kind == "H" else ""
                if box.kind == "S":
                    yield f'[{port}]\t{there}{own}\t\t# "{peer.name}" lid 0 {pace}'
                else:
                    yield f'[{port}]({box.guid + port:x}) \t{there}\t\t# lid 0 lmc 0 "{peer.name}" lid 0 {pace}'
            yield ""

    def text(self) -> str:
        return "\n".join(self.lines()) + "\n"


def fat_tree(
    hosts: int, rails: int, *, radix: int = 64, plane: int | None = None, aggregation: bool = False, pace: str = "4xHDR"
) -> Net:
    """A fabric of `hosts` with `rails` adapters each; with `plane`, only that rail's own fabric.

    `radix` is the ports a switch has for cables: half go down from a leaf, half up.
    """
    net = Net(rails=rails)
    down = up = radix // 2
    which = range(rails) if plane is None else [plane]
    at = plane or 0
    adapters = {
        (host, rail): net.add("H", host_guid(host, rail), 1, f"gpu-{host:05d} mlx5_{rail}", 0x1021)
        for host in range(hosts)
        for rail in which
    }
    leaves: list[Box] = []
    for group in range(math.ceil(hosts / down)):
        for rail in which:
            guid = switch_guid(at, 1, len(leaves))
            leaf = net.add("S", guid, radix + 1, f"MF0;leaf-su{group:03d}-r{rail}:MQM9700/U1", 0xD2F2)
            leaves.append(leaf)
            for slot in range(down):
                if (host := group * down + slot) < hosts:
                    net.cable(leaf, slot + 1, adapters[host, rail], 1, pace)
    if 1 < len(leaves) <= radix:
        _spines(net, leaves, down, up, radix, at, pace)
    elif len(leaves) > radix:
        _pods(net, leaves, down, up, radix, at, pace)
    if aggregation:
        for box in net.switches:
            node = net.add("H", box.guid + 8, 1, "Mellanox Technologies Aggregation Node", 0xCF09, box.guid)
            net.cable(box, box.ports, node, 1, pace)
    return net


def _spines(net: Net, leaves: list[Box], down: int, up: int, radix: int, plane: int, pace: str) -> None:
    count = max(1, math.ceil(len(leaves) * up / radix))
    each = max(1, up // count)
    spines = [
        net.add("S", switch_guid(plane, 2, n), radix + 1, f"MF0;spine-{n:04d}:MQM9700/U1", 0xD2F2)
        for n in range(min(count, up // each))
    ]
    for index, leaf in enumerate(leaves):
        for n, spine in enumerate(spines):
            for cable in range(each):
                net.cable(leaf, down + 1 + n * each + cable, spine, index * each + cable + 1, pace)


def _pods(net: Net, leaves: list[Box], down: int, up: int, radix: int, plane: int, pace: str) -> None:
    pods: list[list[Box]] = []
    for start in range(0, len(leaves), down):
        spines = [
            net.add("S", switch_guid(plane, 2, len(pods) * up + n), radix + 1,
                    f"MF0;spine-p{len(pods):03d}-{n:02d}:MQM9700/U1", 0xD2F2)
            for n in range(up)
        ]  # fmt: skip
        pods.append(spines)
        for index, leaf in enumerate(leaves[start : start + down]):
            for n, spine in enumerate(spines):
                net.cable(leaf, down + 1 + n, spine, index + 1, pace)
    cores = 0
    for group in range(up):
        count = math.ceil(len(pods) * up / radix)
        each = max(1, up // count)
        tops = [
            net.add(
                "S", switch_guid(plane, 3, cores + n), radix + 1, f"MF0;core-g{group:02d}-{n:02d}:MQM9700/U1", 0xD2F2
            )
            for n in range(count)
        ]
        cores += count
        for index, spines in enumerate(pods):
            for n, core in enumerate(tops):
                for cable in range(each):
                    if n * each + cable < up and index * each + cable + 1 <= radix:
                        net.cable(spines[group], down + 1 + n * each + cable, core, index * each + cable + 1, pace)
