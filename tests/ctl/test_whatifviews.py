"""What would happen, as an operator reads it."""

from __future__ import annotations

from rich.console import Console

from llmgw.ctl.whatifviews import whatif
from llmgw.wire.modelapi import ReasonView
from llmgw.wire.whatifapi import FateView, GapView, MomentView, ShortView, WhatIfReply

REPLY = WhatIfReply(
    text="n1 is lost",
    replicas=(
        FateView(model="big", replica="big-0", what="unplaced", before=("n1", "n2"), at=90.0, why="n1 is lost"),
        FateView(
            model="tiny", replica="tiny-0", what="moves", before=("n1",), after=("n3",), at=90.0, why="n1 is lost"
        ),
        FateView(model="tiny", replica="tiny-1", what="stays", before=("n2",), after=("n2",)),
        FateView(model="tiny", replica="tiny-2", what="stays", before=("n3",), after=("n3",)),
    ),
    short=(
        ShortView(
            model="big",
            wanted=1,
            before=1,
            reasons=(ReasonView(node="n3", check="gpus"), ReasonView(node="n4", check="gpus")),
            more_reasons=3,
            smallest_change="bring n1 back: its agent is not heard",
        ),
    ),
    gaps=(GapView(model="big", begin=0.0), GapView(model="tiny", begin=0.0, end=90.0)),
    moments=(MomentView(at=90.0, kind="node-lost", text="n1 has been silent"),),
    more_moments=7,
    seconds=90.0,
    complete=False,
    restless=True,
)


def said(reply: WhatIfReply, width: int = 200) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(whatif(reply, width))
    return capture.get()


def test_the_first_line_counts_what_becomes_of_the_replicas() -> None:
    assert said(REPLY).splitlines()[0].strip() == "If n1 is lost: 1 moves, 1 finds no place, 2 stay."


def test_what_does_not_change_is_counted_and_not_listed() -> None:
    text = said(REPLY)
    assert "big-0" in text
    assert "tiny-1" not in text


def test_who_suffers_is_told_with_what_would_help() -> None:
    text = said(REPLY)
    assert "it stays so" in text
    assert "1m30s, and what its start takes" in text.replace(" 30", "30") or "90" in text
    assert "gpus on 2 nodes, and 3 more" in text
    assert "bring n1 back" in text


def test_what_is_not_the_whole_truth_says_so() -> None:
    text = said(REPLY)
    assert "so some of this happens anyway" in text
    assert "longer than it was followed" in text
    assert "and 7 more" in text


def test_a_replica_that_cannot_leave_a_drained_node_is_not_one_of_those_that_stay() -> None:
    stuck = FateView(model="a", replica="a-0", what="stays", before=("n9",), after=("n9",), why="n9 is not emptied")
    text = said(WhatIfReply(text="n9 is drained", replicas=(stuck, FateView(replica="a-1", what="stays"))))
    assert "If n9 is drained: 1 cannot leave, 1 stays." in text
    assert "n9 is not emptied" in text
    assert "a-1" not in text


def test_a_change_that_touches_nothing_says_so_in_a_line() -> None:
    still = WhatIfReply(text="n9 is drained", replicas=(FateView(replica="a-0", what="stays"),))
    assert said(still).strip() == "If n9 is drained: nothing happens to any replica."
