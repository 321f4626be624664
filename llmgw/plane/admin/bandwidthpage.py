"""The page of bandwidth tests: who can reach whom, as a heat map, and each rail of the pair that was chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, redirect, render_template, request
from werkzeug.wrappers import Response as Redirect

from llmgw.errors import LlmgwError
from llmgw.plane.admin.auth import identify

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("bandwidthpage", __name__)

    @part.get("/bandwidth")
    async def bandwidth() -> str | Redirect:
        try:
            identify(request, admin.administrator, admin.authority, admin.sessions, admin.clock())
        except LlmgwError:
            return redirect("/login", 303)
        return await render_template("bandwidth.html", plane=admin.name)

    return part
