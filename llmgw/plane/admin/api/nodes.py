"""What operators do to nodes: cordon, drain, label, acknowledge, expect, revoke, forget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct
from quart import Blueprint, Response

from llmgw.errors import BadInput, Conflict, NotFound
from llmgw.labels import check_label
from llmgw.plane import drains
from llmgw.plane.admin import views
from llmgw.plane.admin.answers import answer, body
from llmgw.plane.expect import in_words
from llmgw.plane.rooms import labels_of
from llmgw.units import format_duration
from llmgw.wire.api import DoneReply
from llmgw.wire.facts import NodeId

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

#: The longest acknowledgement: a problem that nobody looks at for longer is forgotten.
_LONGEST = 90 * 86400.0
#: The longest time that a replica may take to finish its requests.
_LONGEST_DRAIN = 7 * 86400.0


class Drain(Struct, frozen=True, forbid_unknown_fields=True):
    """How many seconds what leaves the node may finish its requests; null: as long as the plane's setting says."""

    within: float | None = None


class Labels(Struct, frozen=True, forbid_unknown_fields=True):
    """Labels to set; null takes one away."""

    labels: dict[str, str | None]


class Acknowledgement(Struct, frozen=True, forbid_unknown_fields=True):
    """A problem that is known; 0 seconds ends the acknowledgement."""

    subject: str
    code: str
    seconds: float = 86400.0


class Expectation(Struct, frozen=True, forbid_unknown_fields=True):
    """What the node has now is what it should have; `clear` takes that back."""

    clear: bool = False


class Revocation(Struct, frozen=True, forbid_unknown_fields=True):
    """Why a node is shut out; it is told."""

    why: str = ""


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("nodes", __name__)
    fleet = admin.fleet

    def switch(verb: str, change: Callable[[NodeId], Awaitable[None]], done: str) -> None:
        @part.post(f"/nodes/<name>/{verb}", endpoint=verb)
        async def switched(name: str) -> Response:
            node = views.known_node(fleet.world.value, name).id
            await change(node)
            return answer(DoneReply(text=done.format(node)))

    switch("cordon", lambda node: fleet.cordon(node, True), "{} is cordoned: it takes no new shard")
    switch("uncordon", lambda node: fleet.cordon(node, False), "{} takes new shards again")
    switch("undrain", lambda node: fleet.drain(node, False), "{} is no longer draining")

    @part.post("/nodes/<name>/drain")
    async def drain(name: str) -> Response:
        within = (await body(Drain)).within
        if within is not None and not 0 <= within <= _LONGEST_DRAIN:
            raise BadInput(f"a drain cannot take {format_duration(within)}", remedy="give 0 seconds to 7 days")
        node = views.known_node(fleet.world.value, name).id
        await fleet.drain(node, True, within)
        if not drains.left(fleet.world.value, node):
            return answer(DoneReply(text=f"{node} is drained: nothing runs there"))
        seconds = fleet.settings.drain if within is None else within
        text = f"{node} is draining: its replicas move elsewhere, and may finish requests for"
        return answer(DoneReply(text=f"{text} {format_duration(seconds)}"))

    @part.post("/nodes/<name>/label")
    async def label(name: str) -> Response:
        wanted = (await body(Labels)).labels
        if not wanted:
            raise BadInput("no label was given", remedy="give KEY=VALUE, or KEY- to take one away")
        for key, value in wanted.items():
            if value is not None:  # one that is there already may be taken away, whatever it is called
                check_label(key, value)
        node = views.known_node(fleet.world.value, name).id
        await fleet.label(node, wanted)
        has = labels_of(fleet.world.value.nodes[node])
        words = ", ".join(f"{key}={value}" for key, value in sorted(has.items()))
        return answer(DoneReply(text=f"{node} has the labels {words}" if words else f"{node} has no labels"))

    @part.post("/nodes/<name>/acknowledge")
    async def acknowledge(name: str) -> Response:
        known = await body(Acknowledgement)
        if not 0 <= known.seconds <= _LONGEST:
            raise BadInput(
                f"{format_duration(known.seconds)} cannot be acknowledged", remedy="give 0 (ends it) to 90 days"
            )
        node = views.known_node(fleet.world.value, name).id
        await fleet.acknowledge(node, known.subject, known.code, known.seconds)
        return answer(DoneReply(text=f"{known.code} of {known.subject} on {node} is acknowledged"))

    @part.post("/nodes/<name>/expect")
    async def expect(name: str) -> Response:
        clear = (await body(Expectation)).clear
        node = views.known_node(fleet.world.value, name).id
        await fleet.expect(node, not clear)
        confirmed = fleet.world.value.nodes[node].expected
        if confirmed is None:
            return answer(DoneReply(text=f"nothing is confirmed of {node} any more: it is compared with its peers"))
        return answer(DoneReply(text=f"{node} is expected to have {in_words(confirmed)}"))

    @part.post("/nodes/<name>/forget")
    async def forget(name: str) -> Response:
        node = views.known_node(fleet.world.value, name)
        if node.connected:
            raise Conflict(
                f"{name} is connected",
                remedy=f"stop its agent first, or shut it out with `llmgw ctl node revoke {name}`",
            )
        # A deleted node is refused (A4): its certificate must not bring it back by itself.
        with suppress(NotFound):
            await admin.authority.revoke(name, "the node was forgotten")
        await fleet.forget(node.id)
        # It may have connected while that was stored: its stream speaks for nobody any more.
        admin.hub.disconnect(node.id, "revoked", "this node was forgotten; to return it must join again")
        return answer(DoneReply(text=f"{name} is forgotten; to return it must join again"))

    @part.post("/nodes/<name>/revoke")
    async def revoke(name: str) -> Response:
        why = (await body(Revocation)).why
        ended = await admin.authority.revoke(name, why)
        admin.hub.disconnect(NodeId(name), "revoked", why or "an administrator revoked this node's certificate")
        count = f"{len(ended)} certificate{'s' if len(ended) != 1 else ''}"
        text = f"{name} is shut out: {count} revoked" if ended else f"{name} was shut out already"
        return answer(DoneReply(text=text))

    return part
