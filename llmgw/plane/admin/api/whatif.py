"""What would happen if: thought through in a thread, for it takes longer than the plane's loop may rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct
from quart import Blueprint, Response

from llmgw.errors import BadInput
from llmgw.plane.admin import whatifview
from llmgw.plane.admin.answers import body
from llmgw.plane.models import models_of
from llmgw.plane.whatif import ApplyModels, DrainNode, Supposition, what_if
from llmgw.units import format_duration
from llmgw.wire.facts import NodeId

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

#: Seconds that a drain may take.
LONGEST_DRAIN = 7 * 86400.0
KINDS = ("drain", "lose", "apply")


class WhatIfOrder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change to be thought through: "drain" of a node, "lose" of a node or a fabric, "apply" of a models.toml."""

    kind: str
    name: str = ""
    models: str = ""
    within: float | None = None  # of a drain: the seconds that what leaves may finish


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("whatif", __name__)

    @part.post("/what-if")
    async def whatif() -> Response:
        order = await body(WhatIfOrder)
        world, now, settings = admin.fleet.world.value, admin.clock(), admin.fleet.settings
        supposed: Supposition
        match order.kind:
            case "drain":
                if order.within is not None and not 0 <= order.within <= LONGEST_DRAIN:
                    raise BadInput(
                        f"a drain cannot take {format_duration(order.within)}", remedy="give 0 seconds to 7 days"
                    )
                supposed, text = DrainNode(NodeId(order.name), order.within), f"{order.name} is drained"
            case "lose":
                fabrics = admin.fabrics.fabrics if admin.fabrics is not None else None
                supposed, text = whatifview.lost(world, fabrics, order.name)
            case "apply":
                supposed, text = (
                    ApplyModels(models_of(order.models, order.name or "models.toml")),
                    "this file is applied",
                )
            case _:
                raise BadInput(f"there is no what-if {order.kind!r}", remedy=f"use one of {', '.join(KINDS)}")

        def think() -> bytes:
            return msgspec.json.encode(whatifview.reply(what_if(world, supposed, now, settings), text))

        return Response(await admin.thinking.of(think), content_type="application/json")

    return part
