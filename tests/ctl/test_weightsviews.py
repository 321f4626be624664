"""How caches and removals look."""

from __future__ import annotations

import msgspec

from llmgw.ctl.client import Answer
from llmgw.ctl.weightsviews import caches, removals
from llmgw.wire.weightsapi import CacheView, HeldView, RemovalReply, RemovalView, WeightsReply
from tests.ctl.test_fabrictables import text


def shown(*nodes: CacheView) -> str:
    return text(caches(Answer(msgspec.json.encode(WeightsReply(nodes=nodes))), 200))


def test_each_model_says_how_much_of_it_is_there_and_why_it_stays() -> None:
    out = shown(
        CacheView(
            node="n1",
            path="/weights",
            free_bytes=5 << 30,
            total_bytes=10 << 30,
            weights=(
                HeldView(source="hf://o/a", bytes=1 << 30, total_bytes=1 << 30, complete=True, in_use=True,
                         needed_by="model a", revision="c0ffee" * 6),
                HeldView(source="hf://o/b", bytes=1 << 20, total_bytes=1 << 30, fetching=True, idle=0.0),
                HeldView(source="hf://o/c", bytes=1 << 20, total_bytes=1 << 30, error="the disk is full", idle=7200.0),
            ),
        ),
        CacheView(node="n2", error="no agent is connected for n2"),
    )  # fmt: skip
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "n1 hf://o/a complete 1.0 GiB now model a c0ffeec0ffee" in lines
    assert "n1 hf://o/b fetching 1.0 MiB of 1.0 GiB" in lines
    assert "n1 hf://o/c failed 1.0 MiB of 1.0 GiB 2h ago" in lines
    assert "n1: hf://o/c: the disk is full" in lines
    assert "n1 5.0 GiB of 10.0 GiB /weights" in lines
    assert "n2 no agent is connected for n2" in lines


def test_a_failure_is_told_in_a_narrow_terminal_too_however_long_its_source_is() -> None:
    source = f"https://files.example/model.gguf#sha256={'3' * 64}"
    held = HeldView(source=source, error=f"{source}: 404", idle=60.0, needed_by="model a")
    reply = Answer(msgspec.json.encode(WeightsReply(nodes=(CacheView(node="gpu-01", weights=(held,)),))))
    lines = [line.rstrip() for line in text(caches(reply, 80)).splitlines()]
    assert lines[0].split() == ["NODE", "SOURCE", "STATE", "BYTES", "USED", "NEEDED", "BY"]
    assert f"gpu-01: {source}: 404" in lines


def test_a_plan_says_what_would_go_what_stays_and_that_nothing_went() -> None:
    node = RemovalView(node="n1", removed=("hf://o/a",), kept={"hf://o/b": "model b needs it"}, freed_bytes=3 << 30)
    away = RemovalView(node="n2", error="no agent is connected for n2")
    plan = text(removals(RemovalReply(nodes=(node, away)), 200))
    assert "3.0 GiB would be freed. Nothing was removed yet: add --yes." in plan
    lines = [" ".join(line.split()) for line in plan.splitlines()]
    assert "n1 would go hf://o/a" in lines
    assert "n1 stays hf://o/b model b needs it" in lines
    assert "n2 not asked no agent is connected for n2" in lines
    assert "3.0 GiB freed." in text(removals(RemovalReply(nodes=(node,), dry_run=False), 200))
    assert "Nothing can be removed." in text(removals(RemovalReply(nodes=(away,)), 200))
    nothing = RemovalReply(nodes=(RemovalView(node="n1"),))
    assert "No weights are in any cache." in text(removals(nothing, 200))
    assert "No cache that was asked has hf://o/z." in text(removals(nothing, 200, ("hf://o/z",)))
