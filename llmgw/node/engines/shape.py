"""Whether an engine's parallel sizes fit the GPUs, the nodes and the model, as it will demand after minutes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from llmgw.node.engines import Objection
from llmgw.node.engines.contents import Contents
from llmgw.node.engines.flags import given, whole
from llmgw.wire.facts import ShardSpec

#: The names of one argument, the one to speak of first.
Flag = tuple[str, ...]


@attrs.frozen
class Sizes:
    """The sizes that a profile's arguments give; without any, one tensor-parallel group of all GPUs."""

    tensor: int
    pipeline: int
    data: int
    nodes: int
    bad: tuple[Objection, ...] = ()

    @classmethod
    def of(cls, spec: ShardSpec, tensor: Flag, pipeline: Flag, data: Flag) -> Sizes:
        nodes = max(1, len(spec.peers))
        sizes = {flag: whole(spec.args, *flag) for flag in (tensor, pipeline, data) if given(spec.args, *flag)}
        bad = tuple(
            Objection("bad-argument", f"{flag[0]} is not a whole number above zero", "give one")
            for flag, size in sizes.items()
            if size is None or size < 1
        )
        alone = 1 if sizes else max(1, len(spec.gpus)) * nodes
        return cls(sizes.get(tensor) or alone, sizes.get(pipeline) or 1, sizes.get(data) or 1, nodes, bad)


def portless(spec: ShardSpec, rank: int, purpose: str) -> Objection | None:
    """An objection where the plane did not say on which port a member is met: it would wait there for nobody."""
    if rank < len(spec.peer_ports) and purpose in spec.peer_ports[rank]:
        return None
    return Objection(
        "bad-shape", f"the plane named no {purpose!r} port of member {rank}", "is the plane older than this agent?"
    )


def misfits(spec: ShardSpec, contents: Contents | None, sizes: Sizes, world: int) -> Iterator[Objection]:
    """What is wrong with a world of so many processes, one for each GPU."""
    gpus = len(spec.gpus) * sizes.nodes
    if spec.gpus and not sizes.bad and world != gpus:
        yield Objection(
            "bad-shape", f"parallel sizes of {world} in all for {gpus} GPUs", "make their product the number of GPUs"
        )
    if world % sizes.nodes:
        yield Objection(
            "bad-shape",
            f"a world of {world} cannot be divided over {sizes.nodes} nodes",
            "use as many GPUs on each node",
        )
    if contents is not None and contents.heads and contents.heads % sizes.tensor:
        yield Objection(
            "bad-shape",
            f"the model's {contents.heads} attention heads cannot be divided by {sizes.tensor}",
            "choose a number of GPUs that divides them",
        )
