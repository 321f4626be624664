"""The page of one replica: its members, their network, what it waits for, over the API's `replicas/NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint
from werkzeug.wrappers import Response as Redirect

from llmgw.plane.admin.behind import behind_login

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("replicapage", __name__)

    @part.get("/replicas/<path:name>")
    async def replica(name: str) -> str | Redirect:
        return await behind_login(admin, "replica.html", replica=name)

    return part
