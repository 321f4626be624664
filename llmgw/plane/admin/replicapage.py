"""The page of one replica: its members, their network, what it waits for, over the API's `replicas/NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, redirect, render_template, request
from werkzeug.wrappers import Response as Redirect

from llmgw.errors import LlmgwError
from llmgw.plane.admin.auth import identify

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("replicapage", __name__)

    @part.get("/replicas/<path:name>")
    async def replica(name: str) -> str | Redirect:
        try:
            identify(request, admin.administrator, admin.authority, admin.sessions, admin.clock())
        except LlmgwError:
            return redirect("/login", 303)
        return await render_template("replica.html", plane=admin.name, replica=name)

    return part
