"""What `smpquery portinfo` says of one end of a link: active against supported and enabled. Pure."""

from __future__ import annotations

import re

from llmgw.rdma.fabric import PortState
from llmgw.rdma.fields import fields
from llmgw.rdma.linkinfo import LANES
from llmgw.rdma.ran import Ran, Trouble, trouble

_WIDTH = re.compile(r"(\d+)X")
_LANE = re.compile(r"(\d+(?:\.\d+)?) Gbps")


def _widths(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(lanes) for lanes in _WIDTH.findall(text)}))


def _speeds(text: str) -> tuple[str, ...]:
    return tuple(name for lane in _LANE.findall(text) if (name := LANES.get(lane, "")))


def portinfo(ran: Ran, guid: int, port: int) -> PortState | Trouble:
    """One port's state. LinkSpeedActive stays at 10 Gb/s for every extended speed, so the extended one counts first."""
    failure = trouble(ran)
    if failure is not None:
        return failure
    said = fields(ran.out.splitlines())
    if "LinkWidthActive" not in said:
        return Trouble("failed", "smpquery printed no PortInfo")
    extended = _speeds(said.get("LinkSpeedExtActive", ""))
    plain = _speeds(said.get("LinkSpeedActive", ""))
    active = extended or plain
    width = _widths(said["LinkWidthActive"])
    mtu = said.get("NeighborMTU", "")
    return PortState(
        guid=guid,
        port=port,
        width=width[0] if len(width) == 1 else 0,
        speed=active[0] if len(active) == 1 else "",
        widths=_widths(said.get("LinkWidthSupported", "")),
        speeds=_speeds(said.get("LinkSpeedSupported", "")) + _speeds(said.get("LinkSpeedExtSupported", "")),
        enabled_widths=_widths(said.get("LinkWidthEnabled", "")),
        enabled_speeds=_speeds(said.get("LinkSpeedEnabled", "")) + _speeds(said.get("LinkSpeedExtEnabled", "")),
        state=said.get("LinkState", ""),
        physical=said.get("PhysLinkState", ""),
        mtu=int(mtu) if mtu.isdecimal() else None,
    )
