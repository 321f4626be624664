"""The admin page: one screen over the API's `overview`, and the door before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Blueprint, Response, redirect, render_template, request
from werkzeug.wrappers import Response as Redirect

from llmgw.errors import Refused
from llmgw.plane.admin.auth import COOKIE, SESSION_SECONDS, whose
from llmgw.plane.admin.behind import behind_login

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("page", __name__)

    @part.get("/")
    async def page() -> str | Redirect:
        return await behind_login(admin, "page.html")

    @part.get("/login")
    async def door() -> str:
        return await render_template("login.html", plane=admin.name, problem="")

    @part.post("/login")
    async def login() -> tuple[str, int] | Redirect:
        # SameSite keeps other sites from using a session, not from opening one of theirs here.
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise Refused("another site sent this form")
        token = (await request.form).get("token", "").strip()
        who = whose(admin.administrator, token)
        if who is None:
            problem = "This is not an administrator's token of this plane."
            return await render_template("login.html", plane=admin.name, problem=problem), 401
        cookie = admin.sessions.open(who, admin.clock(), lambda: whose(admin.administrator, token) is not None)
        response = redirect("/", 303)
        response.set_cookie(
            COOKIE, cookie, max_age=int(SESSION_SECONDS), secure=True, httponly=True, samesite="Strict", path="/"
        )
        return response

    @part.post("/logout")
    async def logout() -> Redirect:
        admin.sessions.close(request.cookies.get(COOKIE, ""))
        response = redirect("/login", 303)
        response.delete_cookie(COOKIE, secure=True, httponly=True, samesite="Strict", path="/")
        return response

    @part.get("/favicon.ico")
    async def icon() -> Response:
        return Response("", 204)

    return part
