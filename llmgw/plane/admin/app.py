"""The admin application: who may ask, the API's parts, the page, and errors in words."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import structlog
import trio
from quart import Response, g, request
from quart_trio import QuartTrio

from llmgw.plane.admin import answers, bandwidthpage, fabricpage, nodepage, page, replicapage
from llmgw.plane.admin.api import BLUEPRINTS
from llmgw.plane.admin.auth import Administrator, Sessions, identify
from llmgw.plane.admin.files import FileResponse
from llmgw.plane.admin.seams import Traffic
from llmgw.plane.agents import Hub
from llmgw.plane.bandwidth.desk import Desk
from llmgw.plane.certs import Authority
from llmgw.plane.fabrics.desk import FabricDesk
from llmgw.plane.fleet import Fleet
from llmgw.plane.thinking import Thinking
from llmgw.plane.tokens import Tokens

log = structlog.get_logger("llmgw.admin")

#: Nothing from elsewhere, no inline script, no frame around us.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@attrs.define
class Admin:
    """What the admin application works on: `administrator` knows bearer tokens, `traffic` what the gateway does now."""

    fleet: Fleet
    hub: Hub
    authority: Authority
    tokens: Tokens
    administrator: Administrator
    traffic: Callable[[], Traffic] = Traffic
    name: str = "plane"
    agents_url: str = "wss://PLANE:7443"
    clock: Callable[[], float] = trio.current_time
    wall: Callable[[], float] = time.time
    since: float = attrs.field(factory=trio.current_time)
    sessions: Sessions = attrs.field(factory=Sessions)
    bandwidth: Desk | None = None
    fabrics: FabricDesk | None = None
    thinking: Thinking = attrs.field(factory=Thinking)


def app(admin: Admin) -> QuartTrio:
    """The ASGI application. A new part of the API is a module in `admin/api` and its line in BLUEPRINTS."""
    quart = QuartTrio(__name__, template_folder="pages", static_folder="static", static_url_path="/static")
    quart.response_class = FileResponse
    quart.config["MAX_CONTENT_LENGTH"] = answers.MOST_BYTES
    quart.config["PROPAGATE_EXCEPTIONS"] = False
    answers.answer_errors(quart)

    @quart.before_request
    async def admit() -> None:
        if request.path.startswith("/api/"):
            g.who = identify(request, admin.administrator, admin.authority, admin.sessions, admin.clock())

    @quart.after_request
    async def guard(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cache-Control"] = "no-cache" if request.path.startswith("/static/") else "no-store"
        if request.method not in ("GET", "HEAD") and request.path.startswith("/api/"):
            # What operators did, for whoever asks later.
            log.info("admin", who=g.get("who"), method=request.method, path=request.path, status=response.status_code)
        return response

    for blueprint in BLUEPRINTS:
        quart.register_blueprint(blueprint(admin), url_prefix="/api/v1")
    quart.register_blueprint(page.blueprint(admin))
    quart.register_blueprint(bandwidthpage.blueprint(admin))
    quart.register_blueprint(fabricpage.blueprint(admin))
    quart.register_blueprint(nodepage.blueprint(admin))
    quart.register_blueprint(replicapage.blueprint(admin))
    return quart
