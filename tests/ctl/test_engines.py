"""How the nodes' engines look."""

from __future__ import annotations

import msgspec

from llmgw.ctl.client import Answer
from llmgw.ctl.engines import table
from llmgw.wire.enginesapi import EnginesReply, EngineView, NodeEnginesView
from tests.ctl.test_fabrictables import text


def test_each_engine_of_each_node_is_a_line_with_what_came_of_it() -> None:
    first = NodeEnginesView(
        node="n1",
        engines=(
            EngineView(engine="vllm", version="0.31", state="installed", wanted=True, preferred=True, detail="/e/vllm"),
            EngineView(engine="vllm", version="0.32", state="installing", wanted=True, detail="installs it"),
        ),
    )
    second = NodeEnginesView(node="n2", engines=(EngineView(engine="sglang", state="unsupported", detail="no GPU"),))
    reply = EnginesReply(wanted={"vllm": "0.31"}, nodes=(first, second))
    out = text(table(Answer(msgspec.json.encode(reply)), 200))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "n1 vllm 0.31 installed preferred /e/vllm" in lines
    assert "n1 vllm 0.32 installing yes installs it" in lines
    assert "n2 sglang unsupported no GPU" in lines


def test_a_fleet_without_engines_says_so() -> None:
    assert "no node has an engine" in text(table(Answer(msgspec.json.encode(EnginesReply())), 200))


def test_a_node_that_has_not_been_heard_has_not_said_that_it_has_no_engine() -> None:
    reply = EnginesReply(nodes=(NodeEnginesView(node="n3"),))
    assert "n3 has said nothing of its engines" in text(table(Answer(msgspec.json.encode(reply)), 200))
