"""What a change in a fabric touches: nodes, rails, and the replicas that run over them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from llmgw.rdma.diff import Change
from llmgw.rdma.fabric import Map, neighbours
from llmgw.rdma.leaves import Owner


class Touched(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names, each sorted. `everyone`: a link between switches above the leaves, so all traffic may have used it."""

    nodes: tuple[str, ...] = ()
    rails: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    everyone: bool = False


def touched(
    change: Change, maps: Iterable[Map], owners: Mapping[int, Owner], replicas: Mapping[str, Iterable[str]]
) -> Touched:
    """What lies on or right below what changed, by the map before and the one after.

    `owners` are by port GUID; `replicas` by node: those of several nodes, since only they use the fabric.
    A host's own link touches that host; a leaf's touches the hosts on that leaf.
    """
    hosts: set[Owner] = set()
    above = False
    hosts_only = True
    for fabric in maps:
        nodes, near = fabric.by_guid(), neighbours(fabric.links)
        ports = {(guid, end) for guid, end in change.ports}
        about = [guid for guid in change.nodes if guid in nodes]
        direct = [nodes[guid] for guid in about if nodes[guid].kind == "host"]
        for node in direct:
            for end in node.ends:
                named = (node.guid, end.number) in ports or not any(guid == node.guid for guid, _ in ports)
                if named and (owner := _owner(owners, node.host_and_device, end.guid)):
                    hosts.add(owner)
        if direct and change.kind not in ("part-gone", "part-new", "switch-gone", "switch-new"):
            continue
        for guid in about:
            if not nodes[guid].switch:
                continue
            hosts_only = False
            below = [
                (nodes[there], link.other(guid, link.a_port if link.a == guid else link.b_port)[1])
                for link in near.get(guid, ())
                if (there := link.b if link.a == guid else link.a) in nodes
            ]
            leaves = [(node, port) for node, port in below if node.kind == "host"]
            above = above or not leaves
            for node, port in leaves:
                end_guid = next((end.guid for end in node.ends if end.number == port), 0)
                if owner := _owner(owners, node.host_and_device, end_guid):
                    hosts.add(owner)
    names = {owner.host for owner in hosts}
    rails = {str(owner.rail) if owner.rail is not None else owner.device for owner in hosts}
    over = {replica for name in names for replica in replicas.get(name, ())}
    return Touched(
        nodes=tuple(sorted(names)),
        rails=tuple(sorted(rails)),
        replicas=tuple(sorted(over)),
        everyone=above and not hosts_only and not hosts,
    )


def _owner(owners: Mapping[int, Owner], hint: tuple[str, str] | None, port_guid: int) -> Owner | None:
    return owners.get(port_guid) or (Owner(*hint) if hint else None)
