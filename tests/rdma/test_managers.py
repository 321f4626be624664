from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.rdma.managers import Managers, Patience, PortKey, Told, fold, gone, judge, known
from llmgw.rdma.ran import Ran, Trouble
from llmgw.rdma.sminfo import answer, managers, remembered
from llmgw.wire.facts import PortManagers, SubnetManager
from tests.rdma import captures

A, B, C = "946dae0300000001", "946dae0300001001", "b0cf0e0010000000"
PATIENCE = Patience(hold=60.0, frozen=300.0)


def manager(guid: str, state: str = "master", priority: int = 14, activity: int = 1, error: str = "") -> SubnetManager:
    return SubnetManager(guid=guid, lid=1, priority=priority, state=state, activity=activity, error=error)


def report(master: SubnetManager | None, *others: SubnetManager, error: str = "") -> PortManagers:
    return PortManagers(device="mlx5_0", master=master, others=others, error=error)


class Watch:
    """Feeds reports and keeps what was told, with the clock in hand."""

    def __init__(self, state: Managers | None = None) -> None:
        self.state = state or Managers()
        self.now = 0.0
        self.told: list[Told] = []

    def hear(
        self, node: str, *args: SubnetManager | None, device: str = "mlx5_0", label: str = "", error: str = ""
    ) -> None:
        master, *others = args or (None,)
        key = PortKey(node, device)
        told = report(master, *(one for one in others if one is not None), error=error)
        self.state, more = fold(self.state, key, label, told, self.now, PATIENCE)
        self.told += more

    def wait(self, seconds: float, step: float = 5.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + step, end)
            self.state, more = judge(self.state, self.now, PATIENCE)
            self.told += more

    @property
    def kinds(self) -> list[str]:
        return [one.kind for one in self.told]

    @property
    def names(self) -> list[str]:
        return sorted(self.state.fabrics)


STANDBY = manager(B, "standby", 5)


def settled() -> Watch:
    """Four nodes on one fabric with a master and a standby, for two minutes."""
    watch = Watch()
    for round_ in range(24):
        for node in "wxyz":
            watch.hear(node, manager(A, activity=round_), manager(B, "standby", 5, round_))
        watch.wait(5.0)
    assert watch.told == []
    return watch


def test_ports_that_see_the_same_managers_are_one_fabric_named_by_the_smallest_guid() -> None:
    watch = settled()
    assert watch.names == [A]
    assert len(watch.state.fabrics[A].ports) == 4
    watch.hear("w", manager(C), device="mlx5_1")
    assert watch.names == [A, C], "another rail, another manager: another fabric"


def test_a_killed_master_is_one_event_with_both_guids_within_one_poll() -> None:
    watch = settled()
    for node in "wxyz":
        watch.hear(node, None, error="the subnet manager at LID 1 does not answer sminfo")
    watch.wait(40.0)
    assert watch.told == [], "a failover may take so long"
    for node in "wxyz":
        watch.hear(node, manager(B, priority=5), manager(A, "", error="does not answer"))
        watch.wait(5.0)
    assert watch.kinds == ["sm-changed"]
    data = dict(watch.told[0].data)
    assert (data["from"], data["to"], data["node"], data["fabric"]) == (A, B, "w", A)
    assert f"{A} does not answer" in watch.told[0].text
    assert "no standby is known" in watch.told[0].text
    assert watch.names == [A], "the fabric keeps its name"
    watch.wait(300.0)
    assert [kind for kind in watch.kinds if kind != "sm-hung"] == ["sm-changed"]


def test_a_hand_back_is_one_event_and_its_moment_of_standby_is_none() -> None:
    watch = settled()
    for node in "wxyz":
        watch.hear(node, manager(B, priority=5))
    watch.told.clear()
    watch.wait(90.0)
    watch.hear("w", None, manager(B, "standby", 5), error="the manager at LID 9 is standby: no master answers just now")
    watch.wait(1.0)
    assert watch.told == []
    for node in "wxyz":
        watch.hear(node, manager(A), manager(B, "standby", 5))
        watch.wait(2.0)
    assert watch.kinds == ["sm-changed"]
    assert f"{B} stands by now" in watch.told[0].text


def test_a_higher_priority_that_appears_keeps_the_fabrics_id_and_is_told_once() -> None:
    """SM01: LID 1 GUID 0x100001 to LID 5 GUID 0x100005, SMIR lists both."""
    watch = Watch()
    old, new = "0000000000100001", "0000000000100005"
    for node in "wxyz":
        watch.hear(node, manager(old, priority=0))
    for node in "wxyz":
        watch.hear(node, manager(new, priority=15), manager(old, "standby", 0))
    assert watch.names == [old]
    assert watch.kinds == ["sm-changed"]


def test_no_manager_at_all_is_told_once_for_the_fabric_of_a_label() -> None:
    """SM03: the cable is fine, sminfo has nobody to ask."""
    watch = Watch()
    trouble = answer(captures.ran("no-sm/sminfo"))
    assert isinstance(trouble, Trouble)
    for node in "wxyz":
        watch.hear(node, None, label="compute", error=str(trouble))
    watch.wait(30.0)
    assert watch.kinds == ["sm-none"]
    assert "no subnet manager" in watch.told[0].text
    watch.hear("w", manager(A), label="compute")
    watch.wait(5.0)
    assert watch.kinds == ["sm-none", "sm-none-over"]


def test_ports_that_cannot_ask_say_nothing_of_the_managers() -> None:
    watch = Watch()
    blind = PortManagers(device="mlx5_0", error="sminfo finds no MAD device: run modprobe ib_umad", code="no-umad")
    for _ in range(14):
        watch.state, more = fold(watch.state, PortKey("w", "mlx5_0"), "compute", blind, watch.now, PATIENCE)
        watch.told += more
        watch.wait(5.0)
    assert watch.kinds == ["sm-unseen"]
    assert "modprobe ib_umad" in watch.told[0].text
    watch.hear("x", manager(A), label="compute")
    watch.wait(5.0)
    assert watch.kinds == ["sm-unseen", "sm-unseen-over"]


def test_a_port_that_never_saw_a_manager_and_has_no_label_is_on_no_fabric() -> None:
    watch = Watch()
    watch.hear("w", None, error="no subnet manager")
    watch.wait(100.0)
    assert (watch.names, watch.told) == ([], [])
    assert watch.state.of("w", "mlx5_0") is None


def test_a_master_that_is_silent_for_longer_than_a_failover_is_told_and_told_again_when_it_is_back() -> None:
    watch = settled()
    for node in "wxyz":
        watch.hear(node, None, error="the subnet manager at LID 1 does not answer sminfo")
    watch.wait(59.0)
    assert watch.told == []
    watch.wait(6.0)
    assert watch.kinds == ["sm-none"]
    assert f"the master {A} (LID 1) does not answer and none took over" in watch.told[0].text
    watch.hear("w", manager(A, activity=99))
    watch.wait(5.0)
    assert watch.kinds == ["sm-none", "sm-none-over"]


def test_a_standby_that_goes_is_told_after_a_while_and_when_it_returns() -> None:
    watch = settled()
    for round_ in range(14):
        watch.hear("w", manager(A, activity=100 + round_), manager(B, "", 5, error="does not answer"))
        watch.wait(5.0)
    assert watch.kinds == ["sm-standby-missing"]
    watch.hear("w", manager(A, activity=200), STANDBY)
    watch.wait(5.0)
    assert watch.kinds == ["sm-standby-missing", "sm-standby-missing-over"]


def test_a_standby_that_the_master_forgot_is_missing_too() -> None:
    watch = settled()
    for round_ in range(14):
        for node in "wxyz":
            watch.hear(node, manager(A, activity=100 + round_))
        watch.wait(5.0)
    assert watch.kinds == ["sm-standby-missing"]


def test_a_memory_that_could_not_be_asked_misses_nobody() -> None:
    watch = settled()
    for round_ in range(14):
        for node in "wxyz":
            watch.hear(node, manager(A, activity=100 + round_), error="saquery did not end within 10 s")
        watch.wait(5.0)
    assert watch.told == []


def test_equal_priorities_are_told_once() -> None:
    watch = Watch()
    for round_ in range(10):
        watch.hear("w", manager(A, priority=9, activity=round_), manager(B, "standby", 9, round_))
        watch.wait(5.0)
    assert watch.kinds == ["sm-equal-priority"]
    assert "same priority 9" in watch.told[0].text


def test_a_split_is_told_when_both_halves_keep_their_own_master() -> None:
    watch = settled()
    for round_ in range(16):
        for node in "wx":
            watch.hear(node, manager(A, activity=100 + round_))
        for node in "yz":
            watch.hear(node, manager(B, priority=5, activity=100 + round_))
        watch.wait(5.0)
    assert watch.kinds == ["sm-changed", "sm-split"]
    assert f"{A} for w mlx5_0/1, x mlx5_0/1; {B} for y mlx5_0/1, z mlx5_0/1" in watch.told[1].text
    assert watch.names == [A], "both halves are still that fabric"
    for node in "yz":
        watch.hear(node, None, manager(B, "standby", 5), error="the manager at LID 9 is standby")
    watch.wait(5.0)
    assert watch.kinds == ["sm-changed", "sm-split"], "the merge is not done while one half has no master"
    for round_ in range(3):
        for node in "wxyz":
            watch.hear(node, manager(A, activity=200 + round_), manager(B, "standby", 5))
        watch.wait(5.0)
    assert watch.kinds == ["sm-changed", "sm-split", "sm-changed", "sm-split-over"]


def test_reports_that_lag_behind_a_failover_are_no_split() -> None:
    watch = settled()
    watch.hear("w", manager(B, priority=5, activity=100), manager(A, "", error="silent"))
    watch.wait(45.0)
    for node in "xyz":
        watch.hear(node, manager(B, priority=5, activity=101), manager(A, "", error="silent"))
    watch.wait(30.0)
    assert watch.kinds == ["sm-changed"]


def test_a_master_whose_activity_stands_still_is_hung() -> None:
    watch = settled()
    for _ in range(70):
        watch.hear("w", manager(A, activity=23), STANDBY)
        watch.wait(5.0)
    assert watch.kinds == ["sm-hung"]
    assert "stands at 23" in watch.told[0].text
    watch.hear("w", manager(A, activity=24), STANDBY)
    watch.wait(5.0)
    assert watch.kinds == ["sm-hung", "sm-hung-over"]


def test_a_restart_of_the_same_manager_is_no_event_though_its_count_drops() -> None:
    watch = settled()
    watch.hear("w", manager(A, activity=1), STANDBY)
    watch.wait(30.0)
    assert watch.told == []


def test_labels_group_ports_whatever_their_managers_say() -> None:
    watch = Watch()
    watch.hear("w", manager(A), label="east")
    watch.hear("x", manager(A), label="west")
    assert watch.names == ["east", "west"]


def test_two_fabrics_turn_out_to_be_one_when_a_port_sees_both_their_managers() -> None:
    watch = Watch()
    watch.hear("w", manager(B))
    watch.hear("x", manager(A))
    assert watch.names == [A, B]
    watch.hear("x", manager(A), manager(B, "standby"))
    assert watch.names == [A]
    assert watch.kinds == ["fabrics-joined"]
    assert len(watch.state.fabrics[A].ports) == 2


def test_a_manager_that_moved_to_another_fabric_does_not_join_them() -> None:
    """The host that ran the standby was cabled elsewhere."""
    watch = settled()
    watch.hear("w", manager(C), device="mlx5_1")
    for node in "wxyz":
        watch.hear(node, manager(A))
    watch.hear("w", manager(C), manager(B, "standby", 5), device="mlx5_1")
    assert watch.names == [A, C]
    assert B not in watch.state.fabrics[A].managers
    assert B in watch.state.fabrics[C].managers


def test_a_port_that_was_cabled_to_another_fabric_moves_there() -> None:
    watch = settled()
    watch.hear("v", manager(C))
    watch.hear("z", manager(C))
    fabric = watch.state.of("z", "mlx5_0")
    assert fabric is not None
    assert fabric.name == C
    assert len(watch.state.fabrics[A].ports) == 3


@pytest.mark.parametrize("silent_first", [False, True])
def test_a_manager_that_nobody_had_seen_takes_the_fabric_over_with_its_name(silent_first: bool) -> None:
    """SM01: the old master is dead, and the memory of the new one does not answer yet or does not hold it."""
    watch = settled()
    if silent_first:
        for node in "wxyz":
            watch.hear(node, None, error="the subnet manager at LID 1 does not answer sminfo")
        watch.wait(30.0)
    for node in "wxyz":
        watch.hear(node, manager(C), error="saquery: the subnet manager does not answer")
        watch.wait(1.0)
    assert watch.kinds == ["sm-changed", "fabrics-joined"]
    fabric = watch.state.of("w", "mlx5_0")
    assert fabric is not None
    assert (fabric.name, fabric.master, len(fabric.ports)) == (A, C, 4)
    for node in "wxyz":
        watch.hear(node, manager(C), manager(A, "standby", 0))
    assert watch.kinds == ["sm-changed", "fabrics-joined"]
    assert watch.names == [A]


def test_ports_that_are_cabled_to_an_unknown_fabric_do_not_take_the_name_of_the_one_they_leave_to_others() -> None:
    watch = settled()
    for node in "wx":
        watch.hear(node, manager(C))
    for node in "yz":
        watch.hear(node, None, error="the subnet manager at LID 1 does not answer sminfo")
    watch.hear("w", manager(C))
    assert watch.names == [A, C]
    watch.hear("v", manager(C, priority=3))
    watch.hear("u", manager("00000000000000ff"))
    watch.hear("u", manager(C))
    for node in "yz":
        watch.hear(node, manager(C))
    fabric = watch.state.of("w", "mlx5_0")
    assert fabric is not None
    assert fabric.name == C, "a port of a third fabric came to it meanwhile"


def test_names_survive_a_restart_of_the_plane() -> None:
    watch = Watch(known([(A, [A, B])], 0.0))
    watch.hear("w", manager(B, priority=5))
    assert watch.names == [A]
    assert watch.told == []


def test_ports_of_a_lost_node_say_nothing_any_more() -> None:
    watch = settled()
    watch.hear("y", manager(B))
    watch.told.clear()
    watch.state = gone(watch.state, [PortKey("y", "mlx5_0")])
    assert watch.state.of("y", "mlx5_0") is None
    for _ in range(20):
        watch.wait(5.0)
    assert "sm-split" not in watch.kinds
    for node in "wxz":
        watch.state = gone(watch.state, [PortKey(node, "mlx5_0")])
    before = len(watch.told)
    watch.wait(300.0)
    assert not [one for one in watch.told[before:] if one.kind == "sm-none"], "nobody is there to miss one"


def recorded() -> Iterable[tuple[float, Ran, Ran]]:
    """The transcript of a real failover, hand-back and end: (time, sminfo, saquery SMIR)."""
    line: tuple[float, Ran] | None = None
    for text in captures.text("failover.txt").splitlines():
        found = re.match(r"\s*(\d+\.\d+) \S+\s+sminfo rc=(\d+) [\d.]+s (.*) \| ?(.*)$", text)
        if found:
            line = (float(found[1]), Ran("sminfo", int(found[2]), found[3], found[4]))
        memory = re.match(r"\s+\['SM lid: \d+'\] SMIR rc=(\d+) [\d.]+s (\[.*?\])", text)
        if memory and line:
            fields = re.findall(r"'([^']*)'", memory[2])
            blocks = [
                f"SMInfoRecord dump:\nLID......{lid}\nGUID.....{guid}\nPriority..{priority}\nSMState..{state}"
                for lid, guid, priority, state in zip(*[iter(fields)] * 4, strict=True)
            ]
            yield (
                line[0],
                line[1],
                Ran("saquery", int(memory[1]), "\n".join(blocks), "Query SA failed" if memory[1] != "0" else ""),
            )
            line = None


def test_the_recorded_failover_hand_back_and_end_tell_three_changes_and_then_nothing() -> None:
    watch = Watch()
    for at, first, memory in recorded():
        watch.wait(max(0.0, at - watch.now), step=1.0)
        told = managers("mlx5_0", 1, answer(first), remembered(memory), {})
        watch.state, more = fold(watch.state, PortKey("n", "mlx5_0"), "", told, watch.now, PATIENCE)
        watch.told += more
    assert [(one.kind, dict(one.data)["from"], dict(one.data)["to"]) for one in watch.told] == [
        ("sm-changed", A, B),
        ("sm-changed", B, A),
        ("sm-changed", A, B),
    ]
    assert watch.names == [A]
    watch.wait(120.0)
    assert watch.kinds[-1] == "sm-none"


def test_the_recorded_hung_manager_is_silent_and_comes_back() -> None:
    watch = Watch()
    for text in captures.text("failover-hung-sm.txt").splitlines():
        found = re.match(r"\s*(\d+\.\d+) [a-z ]+ rc=(-?\d+) [\d.]+s (.*)$", text)
        if found is None or found[2] == "-11":
            continue
        watch.wait(max(0.0, float(found[1]) * 10 - watch.now))
        ran = Ran("sminfo", int(found[2]), found[3], found[3])
        told = managers("mlx5_0", 1, answer(ran), (), {})
        watch.state, more = fold(watch.state, PortKey("n", "mlx5_0"), "", told, watch.now, PATIENCE)
        watch.told += more
    watch.wait(5.0)
    assert watch.kinds == ["sm-none", "sm-none-over"]
    assert "does not answer" in watch.told[0].text


guids = st.sampled_from([A, B, C])


def drawn(master: str | None, others: list[str], error: str) -> PortManagers:
    standing = (manager(one, "standby", 3) for one in others if one != master)
    return report(manager(master) if master else None, *standing, error=error)


told = st.builds(drawn, st.none() | guids, st.lists(guids, max_size=2, unique=True), st.sampled_from(["", "no answer"]))
events = st.lists(
    st.tuples(st.sampled_from("wxyz"), st.sampled_from(["", "", "", "east"]), told, st.floats(0, 100)), max_size=40
)


@given(events)
def test_every_port_is_on_at_most_one_fabric_whatever_is_reported(
    history: list[tuple[str, str, PortManagers, float]],
) -> None:
    state, now, open_ = Managers(), 0.0, set[tuple[str, str]]()
    for node, label, one, later in history:
        now += later
        state, _ = fold(state, PortKey(node, "mlx5_0"), label, one, now, PATIENCE)
        state, told = judge(state, now, PATIENCE)
        for each in told:
            kind, over = each.kind.removesuffix("-over"), each.kind.endswith("-over")
            if kind in ("sm-none", "sm-split"):
                assert ((each.fabric, kind) in open_) == over
                (open_.discard if over else open_.add)((each.fabric, kind))
        placed = [key for fabric in state.fabrics.values() for key in fabric.ports]
        assert len(placed) == len(set(placed)) == len(state.at)
        assert all(key in state.fabrics[name].ports for key, name in state.at.items())
        plain = [guid for fabric in state.fabrics.values() if not fabric.labelled for guid in fabric.managers]
        assert len(plain) == len(set(plain)), "a manager belongs to one fabric"
        assert judge(state, now, PATIENCE) == (state, ()), "judged once, nothing is left to tell"
        for fabric in state.fabrics.values():
            counted = Counter(view.master for view in fabric.ports.values() if view.answering)
            assert dict(fabric.answering) == counted
