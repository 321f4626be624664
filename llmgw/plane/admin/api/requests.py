"""Requests that a node answers itself: its logs, its doctor.

All go one way, `asked`: the request becomes a wait at the node's stream, and a client that goes away cancels
the wait and with it the work on the node (A10). A new kind of request needs its route and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from quart import Blueprint, Response, request

from llmgw.errors import AgentGone, BadInput, Failed, NotFound
from llmgw.plane.admin import views
from llmgw.plane.admin.answers import MOST_WAIT, answer, number
from llmgw.wire.api import DoctorView, FindingView, LogSourceView, LogsReplyView
from llmgw.wire.control import DoctorRequest, LogsRequest, Request
from llmgw.wire.facts import NodeId

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

R = TypeVar("R")

#: Seconds a node has for each (A10).
LOGS_WITHIN = 10.0
DOCTOR_WITHIN = 60.0
_MOST_LINES = 100_000
#: What a node cannot answer because of how it was asked.
_ASKERS = {kind.code: kind for kind in (NotFound, BadInput)}


async def asked(admin: Admin, name: str, question: Request[R], within: float) -> R:
    """A node's answer. Raises NotFound for a name nothing has, on the plane or there, else what `Hub.ask` raises."""
    node = views.known_node(admin.fleet.world.value, name).id
    try:
        return await admin.hub.ask(node, question, within=within)
    except Failed as error:
        raise _ASKERS.get(error.said, Failed)(error.what) from None
    except AgentGone as error:
        if _shut_out(admin, node):
            remedy = "its certificate was revoked or has expired (`llmgw ctl certs`): it must join again"
            raise AgentGone(error.what, remedy=remedy) from None
        raise


def _shut_out(admin: Admin, node: NodeId) -> bool:
    """Whether it has had certificates, and none of them counts any more."""
    return admin.authority.current(node) is None and any(found.name == node for found in admin.authority.list())


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("requests", __name__)

    @part.get("/logs/<name>")
    @part.get("/logs/<name>/<path:source>")
    async def logs(name: str, source: str = "agent") -> Response:
        wait, most = number("wait", 0.0, most=MOST_WAIT), int(number("lines", 100, most=_MOST_LINES))
        question = LogsRequest(
            source=source,
            run=request.args.get("run", ""),
            lines=most,
            after=request.args.get("after", ""),
            wait=wait,
        )
        reply = await asked(admin, name, question, wait + LOGS_WITHIN)
        return answer(
            LogsReplyView(
                node=name,
                source=reply.source or source,
                run=reply.run,
                lines=reply.lines if most else (),  # a node has one at least
                cursor=reply.cursor,
                truncated=reply.truncated,
                sources=tuple(
                    LogSourceView(name=found.name, runs=found.runs, bytes=found.bytes) for found in reply.sources
                ),
            )
        )

    @part.get("/doctor/<name>")
    async def doctor(name: str) -> Response:
        only = tuple(check for text in request.args.getlist("only") for check in text.split(",") if check)
        reply = await asked(admin, name, DoctorRequest(only=only), DOCTOR_WITHIN)
        return answer(
            DoctorView(
                node=name,
                seconds=reply.seconds,
                findings=tuple(
                    FindingView(
                        check=finding.check,
                        outcome=finding.outcome,
                        text=finding.text,
                        subject=finding.subject,
                        numbers=finding.numbers,
                        remedy=finding.remedy,
                        seconds=finding.seconds,
                    )
                    for finding in reply.findings
                ),
            )
        )

    return part
