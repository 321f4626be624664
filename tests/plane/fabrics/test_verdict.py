from __future__ import annotations

import msgspec
from msgspec.structs import replace

from llmgw.plane.fabrics.verdict import Misplacement, Named, Question, Verdict, judged, misplaced
from llmgw.rdma.fabric import Map, PortCounters, pack
from tests.rdma.trees import guid_of, link, swapped, tree, without
from tests.rigs.ib.net import host_guid

TREE = tree(16, 2, 8, aggregation=True)


def verdict(new: Map | bytes, base: Map | None = None, counted: Map | None = None, **more: object) -> Verdict:
    question = Question(
        new=new if isinstance(new, bytes) else pack(new),
        base=pack(base) if base else b"",
        counted=pack(counted) if counted else b"",
        **more,  # type: ignore[arg-type]
    )
    return msgspec.msgpack.decode(judged(msgspec.msgpack.encode(question)), type=Verdict)


def names(*named: Named) -> tuple[bytes, ...]:
    return (msgspec.msgpack.encode(list(named)),)


def counted(at: float, **counters: int) -> Map:
    leaf = guid_of(TREE, "MF0;leaf-su000-r0")
    return replace(TREE, counters=(PortCounters(leaf, 2, counters),), counters_at=at)


def test_hosts_are_counted_as_machines_and_their_parts_apart() -> None:
    found = verdict(TREE)
    assert (found.counts.hosts, found.counts.adapters, found.counts.switches, found.counts.others) == (16, 32, 12, 12)
    assert found.complete


def test_bytes_that_are_no_map_are_told_and_not_raised() -> None:
    assert "not a packed map" in verdict(b"nonsense").unreadable


def test_the_first_map_is_compared_with_nothing() -> None:
    assert verdict(TREE).changes == ()


def test_a_partial_map_tells_no_changes() -> None:
    partial = replace(without(TREE, link(TREE, host_guid(1, 0), 1)), complete=False, holes=("x",))
    assert verdict(partial, TREE).changes == ()


def test_a_change_names_the_replicas_over_it() -> None:
    owner = Named(host_guid(3, 1) + 1, "node-3", "mlx5_1", 1)
    found = verdict(
        without(TREE, link(TREE, host_guid(3, 1), 1)), TREE, names=names(owner), replicas={"node-3": ("llama-0",)}
    )
    (told,) = found.changes
    assert (told.touched.nodes, told.touched.rails, told.touched.replicas) == (("node-3",), ("1",), ("llama-0",))


def test_counters_are_judged_between_two_readings_and_only_there() -> None:
    before, after = counted(0.0, SymbolErrorCounter=100), counted(300.0, SymbolErrorCounter=5000)
    assert verdict(after).faults == ()
    (fault,) = verdict(after, counted=before).faults
    assert (fault.kind, fault.grade) == ("link-errors", "bad")
    assert verdict(counted(300.0, SymbolErrorCounter=100), counted=before).faults == ()
    assert verdict(counted(300.0, SymbolErrorCounter=3), counted=before).faults == (), "somebody reset it"


def test_a_counter_at_its_maximum_is_a_warning_even_in_the_first_reading() -> None:
    (fault,) = verdict(counted(0.0, SymbolErrorCounter=65535)).faults
    assert fault.grade == "warn"
    assert "at the maximum" in fault.text


def test_counters_over_a_time_in_which_the_cable_was_out_say_nothing_of_the_cable() -> None:
    leaf = guid_of(TREE, "MF0;leaf-su000-r0")
    before = replace(without(TREE, link(TREE, leaf, 2)), counters=(), counters_at=0.0)
    assert verdict(counted(300.0, PortXmitDiscards=700), counted=before).faults == ()


def test_packets_dropped_while_cables_elsewhere_were_moved_are_no_fault_and_bit_errors_still_are() -> None:
    a, b = link(TREE, host_guid(3, 0), 1), link(TREE, host_guid(3, 1), 1)
    elsewhere = replace(swapped(TREE, a, b), counters=(), counters_at=0.0)
    assert verdict(counted(300.0, PortXmitDiscards=700), counted=elsewhere).faults == ()
    assert verdict(counted(300.0, PortXmitDiscards=700), counted=counted(0.0)).faults != ()
    assert verdict(counted(300.0, SymbolErrorCounter=5000), counted=elsewhere).faults != ()


def test_a_map_tells_which_strangers_it_shows() -> None:
    found = verdict(TREE, strangers=(host_guid(1, 0) + 1, 0x99))
    assert found.known == (host_guid(1, 0) + 1,)


def test_cables_in_the_wrong_leaf_are_told_with_the_map_they_are_on() -> None:
    wrong = swapped(TREE, link(TREE, host_guid(3, 0), 1), link(TREE, host_guid(3, 1), 1))
    other = tree(8, 1, 8)
    maps = msgspec.msgpack.encode([pack(other), b"not a map", pack(wrong)])
    found = msgspec.msgpack.decode(misplaced(maps, msgspec.msgpack.encode(())), type=list[Misplacement])
    assert [one.index for one in found] == [2, 2]
    assert all("swapped with" in one.fault.text for one in found)
