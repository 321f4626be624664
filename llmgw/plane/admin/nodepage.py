"""The page of one node: its problems, GPUs, ports and what happened there, over the API's `nodes/NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, redirect, render_template, request
from werkzeug.wrappers import Response as Redirect

from llmgw.errors import LlmgwError
from llmgw.plane.admin.auth import identify

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("nodepage", __name__)

    @part.get("/nodes/<name>")
    async def node(name: str) -> str | Redirect:
        try:
            identify(request, admin.administrator, admin.authority, admin.sessions, admin.clock())
        except LlmgwError:
            return redirect("/login", 303)
        return await render_template("node.html", plane=admin.name, node=name)

    return part
