"""What the fleet is and what is wanted of it: status, nodes, problems, why, apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from quart import Blueprint, Response, request

from llmgw.errors import BadInput
from llmgw.plane.admin import views
from llmgw.plane.admin.answers import answer, flag
from llmgw.wire.modelapi import ApplyReply

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

#: Events that the page's overview carries.
_RECENT = 100
#: Events that an answer about one node carries; `GET /events?node=NAME` has all that are kept.
_HISTORY = 50
#: However many pages are open, the overview is made at most this often (seconds): 50 ms of the plane's loop at
#: a thousand nodes.
_REDRAWN = 1.0


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("fleet", __name__)
    fleet = admin.fleet

    @part.get("/status")
    async def status() -> Response:
        return answer(
            views.status(
                fleet.world.value,
                admin.clock(),
                admin.wall(),
                plane=admin.name,
                since=admin.since,
                traffic=admin.traffic(),
                latest=fleet.events.latest.value,
                settings=fleet.settings,
            )
        )

    drawn: tuple[float, bytes] | None = None

    @part.get("/overview")
    async def overview() -> Response:
        nonlocal drawn
        now = admin.clock()
        if drawn is None or now - drawn[0] >= _REDRAWN:
            drawn = (
                now,
                msgspec.json.encode(
                    views.overview(
                        fleet.world.value,
                        now,
                        admin.wall(),
                        plane=admin.name,
                        since=admin.since,
                        traffic=admin.traffic(),
                        latest=fleet.events.latest.value,
                        events=fleet.events.last(_RECENT),
                        settings=fleet.settings,
                    )
                ),
            )
        return Response(drawn[1], content_type="application/json")

    @part.get("/nodes")
    async def nodes() -> Response:
        return answer(views.nodes(fleet.world.value, admin.clock()))

    @part.get("/nodes/<name>")
    async def node(name: str) -> Response:
        happened = fleet.events.about(name, _HISTORY)
        return answer(
            views.node(fleet.world.value, admin.clock(), name, happened, admin.traffic(), settings=fleet.settings)
        )

    @part.get("/problems")
    async def problems() -> Response:
        return answer(views.problems(fleet.world.value, admin.clock()))

    @part.get("/why/<path:model>")
    async def why(model: str) -> Response:
        world, now, wall, traffic = fleet.world.value, admin.clock(), admin.wall(), admin.traffic()
        return answer(await admin.thinking.of(lambda: views.why(world, now, wall, model, traffic)))

    @part.post("/apply")
    async def apply() -> Response:
        data = await request.get_data()
        name = request.args.get("name", "") or "models.toml"
        try:
            text = data.decode() if isinstance(data, bytes) else data
        except UnicodeDecodeError as error:
            raise BadInput(f"{name} is not UTF-8 text (byte {error.start})") from None
        dry_run = flag("dry_run")
        applied = await fleet.apply(text, dry_run=dry_run, name=name)
        return answer(
            ApplyReply(
                dry_run=dry_run,
                added=applied.added,
                changed=applied.changed,
                removed=applied.removed,
                unchanged=applied.unchanged,
                words=dict(applied.words),
            )
        )

    return part
