"""Fabrics: what is known of them, their maps and drawings, what changed, and a scan now."""

from __future__ import annotations

import zlib
from typing import Protocol

import trio
from msgspec import Struct
from quart import Blueprint, Response, request

from llmgw.errors import Unavailable
from llmgw.plane.admin.answers import answer, body
from llmgw.plane.fabrics.desk import FabricDesk
from llmgw.wire.fabricapi import ScanReply
from llmgw.wire.facts import NodeId


class HasFabrics(Protocol):
    """What of the admin application this part needs. None: this plane watches no fabrics (it is not the leader)."""

    @property
    def fabrics(self) -> FabricDesk | None: ...


class ScanOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scan to be made now: of a fabric by its name ("": the only one), or through one port of a node."""

    fabric: str = ""
    node: str = ""
    device: str = ""
    number: int = 1
    raw: bool = False


def blueprint(admin: HasFabrics) -> Blueprint:
    part = Blueprint("fabrics", __name__)

    def desk() -> FabricDesk:
        if admin.fabrics is None:
            raise Unavailable("this plane watches no fabrics now", remedy="ask the leader")
        return admin.fabrics

    @part.get("/fabrics")
    async def fabrics() -> Response:
        return answer(desk().all())

    # A fabric's name may hold anything, slashes too: it is a parameter and no part of the path.
    @part.get("/fabric")
    async def fabric() -> Response:
        return answer(await desk().one(desk().only(request.args.get("name", ""))))

    @part.get("/fabric/map.svg")
    async def drawing() -> Response:
        name = desk().only(request.args.get("name", ""))
        svg = await desk().drawing(name, request.args.get("scan", ""))
        return Response(svg, content_type="image/svg+xml; charset=utf-8")

    @part.get("/fabric/link")
    async def link() -> Response:
        name = desk().only(request.args.get("name", ""))
        return answer(await desk().link(name, request.args.get("end", "")))

    @part.get("/fabric/diff")
    async def diff() -> Response:
        name = desk().only(request.args.get("name", ""))
        return answer(await desk().diff(name, request.args.get("from", ""), request.args.get("to", "")))

    @part.get("/fabric/route")
    async def route() -> Response:
        name = desk().only(request.args.get("name", ""))
        return answer(await desk().route(name, request.args.get("from", ""), request.args.get("to", "")))

    @part.post("/fabric-scan")
    async def scan() -> Response:
        order = await body(ScanOrder)
        raw = b""
        if order.node:
            found, raw = await desk().fabrics.scan_from(NodeId(order.node), order.device, order.number, raw=order.raw)
        else:
            found = await desk().fabrics.scan(desk().only(order.fabric))
        text = await trio.to_thread.run_sync(lambda: zlib.decompress(raw).decode(errors="replace")) if raw else ""
        return answer(ScanReply(fabric=found.fabric, scan=desk().scan_view(found), raw=text))

    return part
