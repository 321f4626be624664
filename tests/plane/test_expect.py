"""What a node should have: confirmed by an operator, or as its peers have it; told and cleared at two speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map
from msgspec.structs import replace

from llmgw.errors import Conflict, NotFound
from llmgw.plane import operate
from llmgw.plane.checks import Need, refusals
from llmgw.plane.expect import AFTER, CLEAR, Expectations, in_words, inventory, problems
from llmgw.plane.rooms import room
from llmgw.plane.world import Inventory, Node, OpenProblem, Stage, World
from llmgw.wire.agent import Heartbeat, Register
from llmgw.wire.facts import Gpu, GpuDriver, GpuLoad, Grade, NodeId, Port, Problem
from tests.plane.worlds import CLOCK, GIB, gpus, hear, model, profile, register, world
from tests.strategies import registers

N = NodeId("n1")


def rails(count: int, rate: float | None = 400.0, state: str = "ACTIVE") -> tuple[Port, ...]:
    return tuple(Port(device=f"mlx5_{n}", kind="ib", state=state, rate_gbps=rate) for n in range(count))


def machine(
    name: str = "n1", gpu: int = 8, ports: tuple[Port, ...] | None = None, memory: int = 2048 * GIB, **more: object
) -> Register:
    made = register(name, gpu=gpu, memory=memory)
    return replace(made, ports=rails(8) if ports is None else ports, gpu_driver=GpuDriver(version="570.172.08"), **more)


def node(facts: Register, *open_: Problem, links: int | None = 18) -> Node:
    made = world(facts).nodes[facts.node]
    loads = {gpu.uuid: GpuLoad(gpu.uuid, nvlinks_up=links) for gpu in facts.gpus}
    told = {(p.subject, p.code): OpenProblem(p, 0.0, 0.0, CLOCK) for p in open_}
    return attrs.evolve(made, gpu_loads=Map(loads), problems=Map(told))


def have(facts: Register, links: int | None = 18) -> Inventory:
    found = inventory(node(facts, links=links))
    assert found is not None
    return found


def texts(found: Iterable[Problem]) -> dict[str, tuple[str, Grade]]:
    return {problem.code: (problem.text, problem.grade) for problem in found}


FULL = have(machine())


def test_a_node_as_it_was_confirmed_has_no_problem() -> None:
    assert problems(node(machine()), (), FULL) == ()
    assert in_words(FULL) == (
        "8 H100 GPUs, 18 NVLinks up on each H100, 8 fabric ib ports, 8 active at 400 Gb/s or more, 2048 GiB of memory"
    )


@pytest.mark.parametrize(
    ("facts", "links", "code", "text", "grade"),
    [
        (machine(gpu=7), 18, "fewer-gpus", "7 H100 GPUs, 8 confirmed", Grade.BAD),
        (machine(gpu=0), 18, "fewer-gpus", "0 H100 GPUs, 8 confirmed", Grade.BAD),
        (machine(), 16, "fewer-nvlinks", "16 NVLinks are up on the best H100, 18 confirmed", Grade.WARN),
        (machine(ports=rails(6)), 18, "fewer-ports", "6 fabric ib ports, 8 confirmed", Grade.WARN),
        (
            machine(ports=(*rails(7), Port(device="mlx5_7", kind="ib", state="DOWN"))),
            18,
            "ports-not-up",
            "7 fabric ib ports are active, 8 confirmed (down: mlx5_7)",
            Grade.WARN,
        ),
        (
            machine(ports=(*rails(7), Port(device="mlx5_7", kind="ib", state="ACTIVE", rate_gbps=200.0))),
            18,
            "ports-slower",
            "mlx5_7 200 Gb/s; 400 confirmed",
            Grade.WARN,
        ),
        (machine(memory=1920 * GIB), 18, "less-memory", "1920.0 GiB of memory, 2048.0 confirmed", Grade.WARN),
    ],
)
def test_what_is_less_than_confirmed_is_named_with_both_numbers(
    facts: Register, links: int, code: str, text: str, grade: Grade
) -> None:
    assert texts(problems(node(facts, links=links), (), FULL)) == {code: (text, grade)}


def test_more_than_confirmed_is_no_problem() -> None:
    assert problems(node(machine(gpu=10, ports=rails(9, 800.0), memory=4096 * GIB), links=20), (), FULL) == ()


def test_what_the_node_tells_itself_is_not_told_twice() -> None:
    def own(subject: str, code: str, grade: Grade = Grade.BAD) -> Problem:
        return Problem(subject=subject, code=code, grade=grade, text="")

    # A GPU that cannot be read is listed, though without its name.
    lost = (*gpus(7, node="n1"), Gpu(uuid="GPU-n1-7", unreadable="fallen off the bus"))
    assert problems(node(replace(machine(), gpus=lost)), (), FULL) == ()
    assert problems(node(machine(gpu=0), own("node", "driver-absent")), (), FULL) == ()
    assert problems(node(machine(ports=rails(7)), own("port:mlx5_7/1", "port-missing")), (), FULL) == ()
    down = (*rails(7), Port(device="mlx5_7", kind="ib", state="DOWN"))
    assert problems(node(machine(ports=down), own("port:mlx5_7/1", "port-down")), (), FULL) == ()
    # A mere note does not count: this port was never seen up since the last boot, and it should be.
    noted = node(machine(ports=down), own("port:mlx5_7/1", "port-down", Grade.NOTE))
    assert list(texts(problems(noted, (), FULL))) == ["ports-not-up"]


def test_a_driver_that_has_not_answered_yet_is_no_lack_of_gpus() -> None:
    early = replace(machine(gpu=0), gpu_driver=GpuDriver())
    assert problems(node(early), (), FULL) == ()
    assert list(texts(problems(node(replace(early, gpu_driver=GpuDriver(absent="no driver"))), (), FULL)))


def test_a_node_with_less_than_most_of_its_peers_is_told_of_and_no_more() -> None:
    peers = [node(machine(f"n{n}")) for n in range(2, 5)]
    odd = node(machine(gpu=7, ports=rails(8, 200.0)))
    assert texts(problems(odd, [*peers, odd], None)) == {
        "fewer-gpus": ("7 H100 GPUs, 8 usual among 4 H100 nodes", Grade.WARN),
        "ports-slower": (
            ", ".join(f"mlx5_{n} 200 Gb/s" for n in range(8)) + "; 400 usual among 4 H100 nodes",
            Grade.NOTE,
        ),
    }
    assert problems(peers[0], [*peers, odd], None) == ()


def test_two_sorts_in_equal_number_are_how_a_fleet_is_built() -> None:
    two = [node(machine(f"a{n}")) for n in range(2)] + [node(machine(f"b{n}", gpu=4, ports=rails(2))) for n in range(2)]
    assert [problems(each, two, None) for each in two] == [()] * 4


def test_what_was_confirmed_counts_and_not_the_peers() -> None:
    peers = [node(machine(f"n{n}")) for n in range(2, 6)]
    small = machine(gpu=4)
    assert problems(node(small), peers, have(small)) == ()


# --- over time -------------------------------------------------------------------------------------------


def fleet(*facts: Register) -> World:
    return world(*facts)


def judged(shown: World, at: Iterable[float], eyes: Expectations | None = None) -> tuple[World, list[str]]:
    eyes = eyes or Expectations()
    told: list[str] = []
    for now in at:
        shown, events = eyes.judge(shown, now, CLOCK + now)
        told += [f"{event.kind} at {now:g}: {event.text}" for event in events]
    return shown, told


def test_a_lack_is_told_when_it_has_lasted_and_cleared_after_a_clean_window() -> None:
    shown, _ = operate.expect(fleet(machine()), N, True, 0.0, CLOCK)
    shown = hear(shown, "n1", machine(gpu=7), 10.0)
    before = shown.version
    shown, told = judged(shown, (10, 15, 20))
    assert (told, shown.version) == ([], before)
    shown, told = judged(shown, (25, 30))
    assert told == ["problem-opened at 25: n1: fewer-gpus: 7 H100 GPUs, 8 confirmed"]
    assert shown.version == before + 1
    open_ = shown.nodes[N].problems["node", "fewer-gpus"]
    assert (open_.first_at, open_.first_clock, open_.by_plane) == (10.0, CLOCK + 10, True)
    # The node's own list of problems is not about it.
    shown = hear(shown, "n1", Heartbeat(problems=()), 31.0)
    assert ("node", "fewer-gpus") in shown.nodes[N].problems
    shown = hear(shown, "n1", machine(), 40.0)
    shown, told = judged(shown, (40, 60, 95))
    assert told == []
    shown, told = judged(shown, (40 + CLEAR,))
    assert told == ["problem-cleared at 100: n1: fewer-gpus: cleared after 90 s: 7 H100 GPUs, 8 confirmed"]
    assert shown.nodes[N].problems == Map()


def test_a_moment_without_gpus_is_never_told() -> None:
    shown, _ = operate.expect(fleet(machine()), N, True, 0.0, CLOCK)
    shown, told = judged(hear(shown, "n1", machine(gpu=0), 10.0), (10, 20))
    shown, more = judged(hear(shown, "n1", machine(), 22.0), (25, 30, 60, 200))
    assert told + more == []
    assert shown.nodes[N].suspects == Map()


def test_a_relapse_within_the_window_is_the_same_problem() -> None:
    shown, _ = operate.expect(fleet(machine()), N, True, 0.0, CLOCK)
    shown, _ = judged(hear(shown, "n1", machine(gpu=7), 10.0), (10, 10 + AFTER))
    shown, _ = judged(hear(shown, "n1", machine(), 30.0), (30,))
    shown, told = judged(hear(shown, "n1", machine(gpu=7), 50.0), (50, 200))
    assert told == []
    assert shown.nodes[N].problems["node", "fewer-gpus"].first_at == 10.0


def test_a_silent_node_is_not_judged_by_old_facts() -> None:
    shown, _ = operate.expect(fleet(machine()), N, True, 0.0, CLOCK)
    shown = hear(shown, "n1", machine(gpu=7), 10.0)
    away = attrs.evolve(shown.nodes[N], stage=Stage.LOST)
    shown = attrs.evolve(shown, nodes=shown.nodes.set(N, away))
    assert judged(shown, (10, 30, 60))[1] == []


def test_peers_are_nodes_of_one_role_or_with_the_same_gpus() -> None:
    small = [replace(machine(f"s{n}", gpu=1, ports=()), labels={"role": "small"}) for n in range(4)]
    odd = replace(machine("odd", gpu=0, ports=()), labels={"role": "small"})
    _, told = judged(fleet(machine(), *small, odd, register("cpu", memory=GIB)), (0, 15, 30))
    assert told == ["problem-opened at 15: odd: fewer-gpus: 0 H100 GPUs, 1 usual among 5 of role small"]


def test_confirming_what_is_there_ends_the_complaint_at_once() -> None:
    shown, _ = operate.expect(fleet(machine()), N, True, 0.0, CLOCK)
    shown, _ = judged(hear(shown, "n1", machine(gpu=7), 10.0), (10, 25))
    shown, events = operate.expect(shown, N, True, 30.0, CLOCK + 30)
    assert [event.kind for event in events] == ["node-expected", "problem-cleared"]
    assert "7 H100 GPUs" in events[0].text
    assert judged(shown, (31, 60, 120))[1] == []
    shown, events = operate.expect(shown, N, False, 130.0, CLOCK + 130)
    assert ([event.kind for event in events], shown.nodes[N].expected) == (["node-not-expected"], None)


def test_what_is_missing_and_known_keeps_no_shard_away() -> None:
    shown, _ = operate.expect(fleet(machine()), N, True, 0.0, CLOCK)
    shown, _ = judged(hear(shown, "n1", machine(gpu=7), 10.0), (10, 25))
    needy = Need.of(model(of=profile(gpus=1)))
    assert [r.check for r in refusals(room(shown.nodes[N], (), 26.0), needy)] == ["node-health"]
    assert [*refusals(room(shown.nodes[N], (), 26.0), Need.of(model(of=profile(threads=1))))] == []
    shown, _ = operate.acknowledge(shown, N, "node", "fewer-gpus", 3600.0, 26.0, CLOCK + 26)
    shown, _ = judged(shown, (30, 35))
    assert [*refusals(room(shown.nodes[N], (), 36.0), needy)] == []


def test_a_node_that_is_not_there_cannot_be_confirmed() -> None:
    with pytest.raises(NotFound):
        operate.expect(fleet(machine()), NodeId("n2"), True, 0.0, CLOCK)
    shown = fleet(machine())
    away = attrs.evolve(shown.nodes[N], connected=False)
    with pytest.raises(Conflict, match="not connected"):
        operate.expect(attrs.evolve(shown, nodes=shown.nodes.set(N, away)), N, True, 0.0, CLOCK)


@given(registers(), registers())
def test_no_node_lacks_what_it_has(now: Register, other: Register) -> None:
    mine = node(now)
    confirmed = inventory(mine)
    assert confirmed is not None
    assert problems(mine, (), confirmed) == ()
    problems(node(other), (mine, node(other)), None)
    problems(node(other), (), confirmed)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["n1", "n2", "n3", "n4"]),
            st.sampled_from([machine, lambda name: machine(name, gpu=7), lambda name: machine(name, ports=rails(6))]),
            st.sampled_from([18, 16, None]),
            st.sampled_from(["", "expect", "clear", "lost"]),
        ),
        max_size=12,
    )
)
def test_what_is_remembered_between_looks_changes_no_verdict(
    steps: list[tuple[str, Callable[[str], Register], int | None, str]],
) -> None:
    eyes, now = Expectations(), 0.0
    kept = fresh = fleet(*(machine(f"n{n}") for n in range(1, 5)))
    for name, made, links, word in steps:
        id, facts = NodeId(name), made(name)
        beat = Heartbeat(gpus=tuple(GpuLoad(gpu.uuid, nvlinks_up=links) for gpu in facts.gpus))
        after = []
        for shown in (kept, fresh):
            shown = hear(hear(shown, name, facts, now), name, beat, now)
            if word in ("expect", "clear"):
                shown, _ = operate.expect(shown, id, word == "expect", now, CLOCK + now)
            elif word == "lost":
                away = attrs.evolve(shown.nodes[id], stage=Stage.LOST)
                shown = attrs.evolve(shown, nodes=shown.nodes.set(id, away))
            after.append(shown)
        for _ in range(3):
            now += 10.0
            kept, told = eyes.judge(after[0], now, CLOCK + now)
            fresh, again = Expectations().judge(after[1], now, CLOCK + now)
            after = [kept, fresh]
            assert told == again
        assert kept == fresh
