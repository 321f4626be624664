"""The nodes' engines as the API shows them."""

from __future__ import annotations

import attrs

from llmgw.plane.admin.api.engines import engines_view
from llmgw.plane.world import Node, Stage
from llmgw.wire.agent import Register
from llmgw.wire.control import Provision
from llmgw.wire.enginesapi import EngineView
from llmgw.wire.facts import EngineInstall, InstallState, NodeId

WANTED = Provision(
    engines=(EngineInstall(engine="llamacpp"), EngineInstall(engine="vllm", version="0.32")), preferred={"vllm": "0.32"}
)


def node(*installs: EngineInstall) -> Node:
    facts = Register(node=NodeId("n1"), version="1", installs=installs, installable=("llamacpp", "vllm"))
    return attrs.evolve(Node(NodeId("n1"), Stage.READY, 0.0), facts=facts, heard_at=5.0, connected=True)


def test_what_is_there_says_whether_it_is_wanted_and_what_is_not_spoken_of_is_wanted_still() -> None:
    view = engines_view(
        node(
            EngineInstall(engine="llamacpp", version="1", detail="/bin/llama-server"),
            EngineInstall(engine="vllm", version="0.31"),
        ),
        WANTED,
        12.0,
    )
    assert (view.age, view.connected, view.installable) == (7.0, True, ("llamacpp", "vllm"))
    assert view.engines == (
        EngineView(engine="llamacpp", version="1", state="installed", wanted=True, detail="/bin/llama-server"),
        EngineView(engine="vllm", version="0.31", state="installed"),
        EngineView(engine="vllm", version="0.32", state="wanted", wanted=True, detail="the node has not said"),
    )


def test_the_version_for_shards_that_ask_for_none_is_marked_once_it_is_there() -> None:
    for state, preferred in ((InstallState.INSTALLED, True), (InstallState.INSTALLING, False)):
        view = engines_view(node(EngineInstall(engine="vllm", version="0.32", state=state)), WANTED, 5.0)
        (found,) = [one for one in view.engines if one.engine == "vllm"]
        assert (found.wanted, found.preferred) == (True, preferred)


def test_a_node_that_never_spoke_has_nothing_and_can_nothing() -> None:
    view = engines_view(Node(NodeId("n1"), Stage.READY, 0.0), Provision(), 5.0)
    assert (view.engines, view.installable, view.age) == ((), (), None)


def test_nothing_is_said_of_an_engine_that_the_node_is_told_of_but_cannot_install() -> None:
    wanted = Provision(engines=(EngineInstall(engine="sglang", version="1"), *WANTED.engines))
    assert [one.engine for one in engines_view(node(), wanted, 5.0).engines] == ["llamacpp", "vllm"]


def test_a_build_of_the_version_that_is_wanted_is_that_version() -> None:
    (found,) = [
        one
        for one in engines_view(node(EngineInstall(engine="vllm", version="0.32+cpu")), WANTED, 5.0).engines
        if one.engine == "vllm"
    ]
    assert (found.version, found.state, found.wanted, found.preferred) == ("0.32+cpu", "installed", True, True)
