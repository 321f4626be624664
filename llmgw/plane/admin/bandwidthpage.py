"""The page of bandwidth tests: who can reach whom, as a heat map, and each rail of the pair that was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint
from werkzeug.wrappers import Response as Redirect

from llmgw.plane.admin.behind import behind_login

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("bandwidthpage", __name__)

    @part.get("/bandwidth")
    async def bandwidth() -> str | Redirect:
        return await behind_login(admin, "bandwidth.html")

    return part
