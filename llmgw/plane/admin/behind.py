"""Pages behind the login: each is a template that asks the API from within; who is not signed in is led to the door."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import redirect, render_template, request
from werkzeug.wrappers import Response as Redirect

from llmgw.errors import LlmgwError
from llmgw.plane.admin.auth import identify

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


async def behind_login(admin: Admin, template: str, **values: str) -> str | Redirect:
    """The page for whoever is signed in, the way to the login for everybody else."""
    try:
        identify(request, admin.administrator, admin.authority, admin.sessions, admin.clock())
    except LlmgwError:
        return redirect("/login", 303)
    return await render_template(template, plane=admin.name, **values)
