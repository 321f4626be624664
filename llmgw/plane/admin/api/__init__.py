"""The admin API's parts. Each module makes one blueprint of what it serves under /api/v1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quart import Blueprint

from llmgw.plane.admin.api import (
    bandwidth,
    engines,
    events,
    fabrics,
    fleet,
    identity,
    models,
    nodes,
    requests,
    weights,
    whatif,
)

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin

#: A new part of the API is a module beside this one and its line here.
BLUEPRINTS: tuple[Callable[[Admin], Blueprint], ...] = (
    fleet.blueprint,
    models.blueprint,
    nodes.blueprint,
    requests.blueprint,
    events.blueprint,
    identity.blueprint,
    bandwidth.blueprint,
    fabrics.blueprint,
    weights.blueprint,
    engines.blueprint,
    whatif.blueprint,
)
