"""How far a switch is from the hosts: leaves are tier 1, what only joins leaves 2, and so on. Pure."""

from __future__ import annotations

from llmgw.rdma.fabric import Map, neighbours


def tiers(fabric: Map) -> dict[int, int]:
    """Each switch's tier. Switches that no path joins to a host come last, in a tier of their own."""
    nodes, near = fabric.by_guid(), neighbours(fabric.links)
    found: dict[int, int] = {}
    row = [node.guid for node in fabric.nodes if node.kind == "host"]
    if not row:
        return {node.guid: 1 for node in fabric.switches}
    tier = 0
    seen = set(row)
    while row:
        tier += 1
        row = sorted(
            {
                there
                for guid in row
                for link in near.get(guid, ())
                if (there := link.b if link.a == guid else link.a) not in seen
                and there in nodes
                and nodes[there].switch
            }
        )
        seen.update(row)
        found.update(dict.fromkeys(row, tier))
    last = max(found.values(), default=0) + 1
    found.update({node.guid: last for node in fabric.switches if node.guid not in found})
    return found
