"""One node on one screen, as text."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from llmgw.ctl import nodetables
from llmgw.ctl.client import Answer
from llmgw.wire.apicommon import EventView
from llmgw.wire.facts import Imex
from llmgw.wire.nodeapi import GpuProcessView, GpuView, NodeReply, NodeRow, PortView


def screen(reply: NodeReply) -> str:
    out = io.StringIO()
    Console(file=out, width=400).print(nodetables.node(Answer(msgspec.json.encode(reply)), 400))
    return out.getvalue()


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (None, ""),
        (0.4, "(as the plane's)"),
        (3600.0, "(1h ahead of the plane's)"),
        (-90.0, "(1m 30s behind the plane's)"),
    ],
)
def test_how_far_a_clock_is_off_is_said_in_words(offset: float | None, words: str) -> None:
    shown = screen(NodeReply(node=NodeRow(id="n1"), node_clock=1.8e9, clock_offset=offset))
    line = next(line for line in shown.splitlines() if line.startswith("clock there"))
    assert words in line
    assert ("plane's" in line) == bool(words)


def test_a_process_that_cannot_be_told_apart_is_not_called_foreign() -> None:
    mine = GpuProcessView(pid=7, name="vllm", memory_bytes=1 << 30, shard="m-0-0")
    foreign = GpuProcessView(pid=8, name="train", memory_bytes=1 << 30)
    unsure = GpuProcessView(pid=9, name="(PID namespace differs)", memory_bytes=1 << 30, shard="?")
    told = screen(NodeReply(gpus=(GpuView(uuid="GPU-0", index=0, processes=(mine, foreign)),)))
    assert "Foreign processes on GPUs" in told
    assert "train" in told
    assert "vllm" not in told
    untold = screen(NodeReply(gpus=(GpuView(uuid="GPU-0", index=0, processes=(unsure,)),)))
    assert "Foreign" not in untold
    assert "cannot be told: PID namespace differs" in untold


def test_settings_of_the_host_imex_and_what_happened_lately_are_on_the_screen() -> None:
    limits: dict[str, bool | int | str | tuple[str, ...] | None] = {
        "memlock_bytes": -1,
        "hugepages_total": 512,
        "hugepage_bytes": 2 << 20,
        "iommu": "passthrough",
        "acs_redirect": ("0000:00:01.0", "0000:00:02.0"),
        "peer_memory": (),
        "persistence_daemon": True,
        "fabric_manager": "active",
        "umad": None,
        "uverbs": True,
    }
    happened = tuple(
        EventView(id=n, kind="port-changed", text=f"n1 mlx5_0/1: change {n}", clock=1.8e9) for n in range(1, 40)
    )
    shown = screen(
        NodeReply(
            limits=limits,
            imex=Imex(state="DEGRADED", nodes=(("a", "READY"),), disconnected=("b",), mismatch=("c",), channels=2),
            gpus=(GpuView(uuid="GPU-5", index=5),),
            ports=(PortView(device="mlx5_0", state="ACTIVE", nearest_gpus=("GPU-5", "GPU-unknown")),),
            history=happened,
        )
    )
    for words in (
        "memlock         unlimited",
        "huge pages      512 of 2.0 MiB",
        "IOMMU           passthrough",
        "ACS             redirects at 2 bridges",
        "peer memory     none",
        "persistence     yes",
        "fabric manager  active",
        "DEGRADED, 1 node, 2 channels, not reached: b, differs from: c",
        "5, GPU-unknown",
        "change 39",
        "change 25",
    ):
        assert words in shown, shown
    assert "change 24" not in shown
