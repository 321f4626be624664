"""Who manages a subnet, by its own word (`sminfo`) and by the master's memory (`saquery SMIR`).

`sminfo` asks the LID that the port last learnt, so for a moment of a hand-back it may be answered by a standby: only
state MASTER is the master. SMIR is what the master remembers, refreshed when it sweeps: dead ones linger in it and new
ones show stale states, so each one named there is asked for itself before it counts. Pure.
"""

from __future__ import annotations

import re

from llmgw.rdma.fields import blocks, number
from llmgw.rdma.guids import guid, written
from llmgw.rdma.ran import Ran, Trouble, trouble
from llmgw.wire.facts import PortManagers, SubnetManager

_LINE = re.compile(
    r"sminfo: sm lid (?P<lid>\d+) sm guid 0x(?P<guid>[0-9a-fA-F]{1,16}), activity count (?P<activity>\d+) "
    r"priority (?P<priority>\d+) state (?P<state>\d+)"
)
#: SMInfo:SMState (InfiniBand Architecture, 14.4.1).
STATES = {0: "inactive", 1: "discovering", 2: "standby", 3: "master"}


def answer(ran: Ran, *, port_down: bool = False, can_read_umad: bool | None = None) -> SubnetManager | Trouble:
    """The manager that answered one `sminfo`, or why none did."""
    match = _LINE.search(ran.out)
    if match is not None and ran.exit == 0:
        return SubnetManager(
            guid=written(int(match["guid"], 16)),
            lid=int(match["lid"]) or None,
            priority=int(match["priority"]),
            state=STATES.get(int(match["state"]), ""),
            activity=int(match["activity"]),
        )
    return trouble(ran, port_down=port_down, can_read_umad=can_read_umad) or Trouble(
        "failed", f"sminfo ended with {ran.exit} and printed nothing that can be read"
    )


def remembered(ran: Ran, *, can_read_umad: bool | None = None) -> tuple[SubnetManager, ...] | Trouble:
    """Every manager in the master's memory, by `saquery SMIR`, in its order; or why it could not be asked."""
    failure = trouble(ran, can_read_umad=can_read_umad)
    if failure is not None:
        return failure
    found: list[SubnetManager] = []
    for block in blocks(ran.out.splitlines(), "SMInfoRecord dump:"):
        try:
            name = written(guid(block["GUID"]))
        except (KeyError, ValueError):
            continue
        found.append(
            SubnetManager(
                guid=name,
                lid=number(block.get("LID")),
                priority=number(block.get("Priority")),
                state=STATES.get(number(block.get("SMState")) or 0, ""),
                activity=number(block.get("ActCount")),
            )
        )
    return tuple(found)


def managers(
    device: str,
    number: int,
    first: SubnetManager | Trouble,
    memory: tuple[SubnetManager, ...] | Trouble,
    asked: dict[str, SubnetManager | Trouble],
) -> PortManagers:
    """What one port knows of its managers, put together from all that was asked.

    `asked` has each manager of the memory by GUID, as it answered for itself. One that did not is kept with its
    error and without a state: it may be dead for long.
    """
    known: dict[str, SubnetManager] = {}
    for one in () if isinstance(memory, Trouble) else memory:
        own = asked.get(one.guid)
        if isinstance(own, SubnetManager) and own.guid == one.guid:
            known[one.guid] = own
        elif isinstance(own, SubnetManager):
            known[one.guid] = SubnetManager(
                guid=one.guid, lid=one.lid, priority=one.priority,
                error=f"LID {one.lid} is answered by the manager {own.guid}",
            )  # fmt: skip
            known.setdefault(own.guid, own)
        else:
            why = own.text if own else "was not asked"
            known[one.guid] = SubnetManager(guid=one.guid, lid=one.lid, priority=one.priority, error=why)
    if isinstance(first, SubnetManager):
        # The own answer is newer than the memory and at least as new as the one through the memory's LID.
        known[first.guid] = known[first.guid] if _master(known.get(first.guid)) else first
    masters = [one for one in known.values() if _master(one)]
    master = masters[0] if masters else None
    if isinstance(first, SubnetManager) and _master(first):
        master = known[first.guid] if _master(known[first.guid]) else first
    error = code = ""
    if isinstance(first, Trouble):
        error, code = (str(first), first.code) if master is None else ("", "")
    elif master is None:
        error = f"the manager at LID {first.lid} is {first.state or 'in an unknown state'}: no master answers just now"
    elif isinstance(memory, Trouble):
        error = memory.text
    others = tuple(sorted((one for one in known.values() if one is not master), key=lambda one: one.guid))
    return PortManagers(device=device, number=number, master=master, others=others, error=error, code=code)


def _master(one: SubnetManager | None) -> bool:
    return one is not None and one.state == "master" and not one.error
