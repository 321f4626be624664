"""Models and their replicas: how they stand, what they were, and what an operator changes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from quart import Blueprint, Response

from llmgw.plane import operate
from llmgw.plane.admin import views
from llmgw.plane.admin.answers import answer, body
from llmgw.plane.profiles import differences
from llmgw.wire.api import DoneReply

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


class Scale(Struct, frozen=True, forbid_unknown_fields=True):
    """So many replicas, from now on."""

    replicas: int


class Rollback(Struct, frozen=True, forbid_unknown_fields=True):
    """The revision to go back to; null: the one before."""

    revision: int | None = None


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("models", __name__)
    fleet = admin.fleet

    @part.get("/models")
    async def models() -> Response:
        return answer(views.models(fleet.world.value, admin.clock(), admin.wall(), admin.traffic(), fleet.settings))

    @part.get("/models/<path:name>/history")
    async def history(name: str) -> Response:
        return answer(views.history(fleet.world.value, name))

    @part.post("/models/<path:name>/scale")
    async def scale(name: str) -> Response:
        wanted = (await body(Scale)).replicas
        before = operate.known_model(fleet.world.value, name).replicas
        await fleet.scale(name, wanted)
        count = f"{wanted} replica{'s' if wanted != 1 else ''}"
        if before == wanted:
            return answer(DoneReply(text=f"{name} has {count} already"))
        return answer(DoneReply(text=f"{name} is scaled from {before} to {count}, until models are applied again"))

    @part.post("/models/<path:name>/rollback")
    async def rollback(name: str) -> Response:
        to = (await body(Rollback)).revision
        before = operate.known_model(fleet.world.value, name)
        await fleet.rollback(name, to)
        after = operate.known_model(fleet.world.value, name)
        what = "; ".join(differences(before.profile, after.profile))
        text = f"{name} goes back from revision {before.revision} to {after.revision}, until models are applied again"
        return answer(DoneReply(text=f"{text}: {what}"))

    @part.get("/replicas")
    async def replicas() -> Response:
        return answer(views.replicas(fleet.world.value, admin.clock(), admin.wall(), admin.traffic(), fleet.settings))

    @part.get("/replicas/<path:name>")
    async def replica(name: str) -> Response:
        return answer(
            views.replica(fleet.world.value, admin.clock(), admin.wall(), name, admin.traffic(), fleet.settings)
        )

    return part
