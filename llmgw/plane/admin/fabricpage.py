"""The page of fabrics: the drawing of each, and the numbers and history of the cable that was clicked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint
from werkzeug.wrappers import Response as Redirect

from llmgw.plane.admin.behind import behind_login

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("fabricpage", __name__)

    @part.get("/fabrics")
    async def fabrics() -> str | Redirect:
        return await behind_login(admin, "fabrics.html")

    return part
