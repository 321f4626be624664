"""Engines on the nodes: which are there, which are being installed, which failed and why."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from quart import Blueprint, Response, request

from llmgw.plane.admin import views
from llmgw.plane.admin.answers import answer
from llmgw.plane.checks import SILENT_INSTALLS
from llmgw.plane.world import Node
from llmgw.wire.control import Provision
from llmgw.wire.enginesapi import EnginesReply, EngineView, NodeEnginesView
from llmgw.wire.facts import EngineInstall, InstallState, same_version

if TYPE_CHECKING:
    from llmgw.plane.admin.app import Admin


def blueprint(admin: Admin) -> Blueprint:
    part = Blueprint("engines", __name__)

    @part.get("/engines")
    async def engines() -> Response:
        world, now = admin.fleet.world.value, admin.clock()
        named = [views.known_node(world, name) for name in request.args.getlist("node") if name]
        nodes = named or [node for _, node in sorted(world.nodes.items())]
        rows = tuple(engines_view(node, admin.fleet.provision(node.id), now) for node in nodes)
        wanted = {one.engine: one.version for one in admin.fleet.engines}
        return answer(EnginesReply(wanted=wanted, nodes=rows))

    return part


def engines_view(node: Node, wanted: Provision, now: float) -> NodeEnginesView:
    """One node's engines as the API shows them. Pure."""
    facts = node.facts
    installable = () if facts is None else SILENT_INSTALLS if facts.installable is None else facts.installable
    return NodeEnginesView(
        node=node.id,
        connected=node.connected,
        age=None if node.heard_at is None else max(0.0, now - node.heard_at),
        installable=installable,
        engines=tuple(_engines(node, wanted, installable)),
    )


def _engines(node: Node, wanted: Provision, installable: Collection[str]) -> Iterator[EngineView]:
    installs = node.facts.installs if node.facts is not None else ()
    asked = {(one.engine, one.version) for one in wanted.engines}
    for install in installs:
        yield EngineView(
            engine=install.engine,
            version=install.version,
            state=install.state.value,
            wanted=any(_is(install, *one) for one in asked),
            preferred=install.state is InstallState.INSTALLED
            and same_version(wanted.preferred.get(install.engine, ""), install.version),
            detail=install.detail,
        )
    for engine, version in sorted(asked):
        # It is told of more than it can have: of what a package may make possible, too.
        if engine in installable and not any(_is(install, engine, version) for install in installs):
            yield EngineView(
                engine=engine, version=version, state="wanted", wanted=True, detail="the node has not said"
            )


def _is(install: EngineInstall, engine: str, version: str) -> bool:
    """Whether that is what is asked for, "" for any version."""
    return install.engine == engine and (not version or same_version(version, install.version))
