"""What two sides' replies amount to: a figure, or the side where it went wrong and why (E7).

The client's figure counts when both processes ended well and both ports stayed up. Else the side whose words explain
the failure comes first: a side that only saw its peer leave explains nothing. Pure.
"""

from __future__ import annotations

import attrs

from llmgw.rdma.causes import Weight, weight_of
from llmgw.rdma.results import Failure
from llmgw.wire.control import BandwidthReply


@attrs.frozen
class Lost:
    """A side that never replied, in the error's words. `stopped`: we ended it ourselves, because the other failed."""

    error: str
    code: str = ""
    stopped: bool = False


Said = BandwidthReply | Lost


@attrs.frozen
class Figure:
    """What the client measured."""

    gbps: float | None
    latency_us: float | None


def outcome(client_name: str, client: Said, server_name: str, server: Said) -> Figure | Failure:
    """The figure of a run, or its failure with the side that explains it."""
    broken = [
        (_weight(said), name, said)
        for name, said in ((client_name, client), (server_name, server))
        if isinstance(said, Lost) or said.error
    ]
    for name, said in ((client_name, client), (server_name, server)):
        if isinstance(said, BandwidthReply) and _went_down(said):
            return Failure(
                side=name,
                error="the port went down during the run",
                code="link-died",
                cause=f"it is {said.state_after} and was {said.state_before}; a figure from such a run means nothing",
                remedy="look at the cable and the switch port",
            )
    measured = isinstance(client, BandwidthReply) and not client.error and client.average_gbps is not None
    if measured and all(weight <= Weight.ECHO for weight, _, _ in broken):
        broken = []  # the server only complains that the client, which was done, closed first
    if broken:
        # The client first where both explain equally well: it is the one that measures.
        _, name, said = max(broken, key=lambda found: found[0])
        if isinstance(said, Lost):
            return Failure(side=name, error=said.error, code=said.code)
        return Failure(side=name, error=said.error, code=said.cause_code, cause=said.cause, remedy=said.remedy)
    assert isinstance(client, BandwidthReply)
    if client.average_gbps is None and client.latency_us is None:
        return Failure(side=client_name, error="it ended well and measured nothing", code="no-result")
    return Figure(client.average_gbps, client.latency_us)


def _weight(said: Said) -> int:
    if isinstance(said, Lost):
        return 0 if said.stopped else 4
    return int(weight_of(said.cause_code))


def _went_down(said: BandwidthReply) -> bool:
    return (
        said.state_before.startswith("ACTIVE") and bool(said.state_after) and not said.state_after.startswith("ACTIVE")
    )
