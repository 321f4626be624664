"""What happened: a page of events, a long poll for the next ones, or all of them as they come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import trio
from quart import Blueprint, Response, request

from llmgw.plane.admin import views
from llmgw.plane.admin.answers import MOST_WAIT, answer, flag, line, number
from llmgw.plane.events import Event, of_node
from llmgw.wire.api import EventsReply

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

_MOST = 10_000
#: A stream says nothing for at most so long: an empty line finds clients that are gone and keeps proxies awake.
_KEEPALIVE = 20.0


def wanted(event: Event, node: str) -> bool:
    return not node or of_node(event, node)


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("events", __name__)
    events = admin.fleet.events

    @part.get("/events")
    async def listed() -> Response:
        limit = int(number("limit", 1000, least=1, most=_MOST))
        after = int(number("after", -1.0, least=-1, most=2**62))
        wait = number("wait", 0.0, most=MOST_WAIT)
        node = request.args.get("node", "")
        if node and not events.about(node, 1):  # of a node that was forgotten there may be some
            views.known_node(admin.fleet.world.value, node)
        if flag("follow"):
            response = Response(follow(after, limit, node), content_type="application/x-ndjson")
            response.timeout = None
            response.headers["X-Accel-Buffering"] = "no"
            return response
        if after >= 0:
            with trio.move_on_after(wait):
                await newer(after, node)
            found = events.after(after, limit)
            latest = found[-1].id if found else events.latest.value
            found = tuple(event for event in found if wanted(event, node))
        else:
            latest = events.latest.value
            found = events.about(node, limit) if node else events.last(limit)
        return answer(EventsReply(events=tuple(map(views.event, found)), latest=latest))

    async def newer(after: int, node: str = "") -> None:
        latest, version = events.latest.value, events.latest.version
        # An `after` from before a lost store is above all ids there are: it gets everything new.
        while latest <= after or (node and not any(wanted(event, node) for event in events.after(after, _MOST))):
            latest, version = await events.latest.next(version)

    async def follow(after: int, limit: int, node: str) -> AsyncIterator[bytes]:
        if after < 0:
            first = events.about(node, limit) if node else events.last(limit)
            after = events.latest.value
        else:
            first = events.after(after, limit)
        while True:
            for happened in first:
                if wanted(happened, node):
                    yield line(views.event(happened))
                after = max(after, happened.id)
            silent = True
            with trio.move_on_after(_KEEPALIVE):
                await newer(after)
                silent = False
            if silent:
                yield b"\n"
            first = events.after(after, limit)

    return part
