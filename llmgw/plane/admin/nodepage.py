"""The page of one node: its problems, GPUs, ports and what happened there, over the API's `nodes/NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint
from werkzeug.wrappers import Response as Redirect

from llmgw.plane.admin.behind import behind_login

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("nodepage", __name__)

    @part.get("/nodes/<name>")
    async def node(name: str) -> str | Redirect:
        return await behind_login(admin, "node.html", node=name)

    return part
