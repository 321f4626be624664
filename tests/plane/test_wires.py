"""A node's rails: what they are called across nodes, the fabric of each, and what is wrong with the rest."""

from __future__ import annotations

import attrs
from immutables import Map
from msgspec.structs import replace

from llmgw.plane.wires import Fault, Wiring, fabric_of, fabrics, wirings
from llmgw.plane.world import Inventory, Node, OpenProblem
from llmgw.wire.agent import Register
from llmgw.wire.facts import Gid, Grade, PortManagers, Problem, SubnetManager
from tests.plane.fabrics_of import ib, labelled, managed, railed, roce
from tests.plane.worlds import gpus, world


def known(made: Register, *problems: Problem, acknowledged: bool = False) -> Node:
    node = world(made).nodes[made.node]
    opened = {
        (problem.subject, problem.code): OpenProblem(problem, 3.0, 3.0, 0.0, 99.0 if acknowledged else None)
        for problem in problems
    }
    return attrs.evolve(node, problems=Map(opened)) if opened else node


def only(made: Register, *problems: Problem, acknowledged: bool = False) -> Wiring:
    (found,) = wirings(known(made, *problems, acknowledged=acknowledged))
    return found


def keys(made: Register) -> dict[str, tuple[object, ...]]:
    return {rail.port.device: rail.key for rail in only(made).rails}


def problem(device: str, code: str, grade: Grade = Grade.BAD) -> Problem:
    return Problem(subject=f"port:{device}/1", code=code, grade=grade, text="as it is")


def test_a_label_says_which_rail_it_is() -> None:
    made = railed("n1", ib(0, rail=3, fabric="red"), ib(1, rail=2, fabric="red"), ib(2, fabric="red"))
    assert keys(made) == {"mlx5_1": ("label", 2, 0), "mlx5_0": ("label", 3, 0)}
    assert only(made).faults == ()  # mlx5_2 is no rail, as the others are labelled


def test_else_the_gpu_next_to_it_by_pci_order() -> None:
    cards = tuple(replace(gpu, pci=f"0000:{9 - n:02x}:00.0") for n, gpu in enumerate(gpus(2, node="n1")))
    made = railed(
        "n1",
        ib(0, fabric="red", nearest_gpus=("GPU-n1-0",)),
        ib(1, fabric="red", nearest_gpus=("GPU-n1-1",)),
        ib(2, fabric="red", nearest_gpus=("GPU-n1-1",)),
        gpu=cards,  # type: ignore[arg-type]
    )
    assert keys(made) == {
        "mlx5_1": ("gpu, one of 2", 0, 0),
        "mlx5_2": ("gpu, one of 2", 0, 1),
        "mlx5_0": ("gpu", 1, 0),
    }


def test_else_the_subnet_or_the_place_in_pci_order() -> None:
    assert keys(labelled("n1", 2)) == {"mlx5_0": ("pci of 2", 0, 0), "mlx5_1": ("pci of 2", 1, 0)}
    apart = keys(railed("n1", roce(0, "10.0.1.1"), roce(1, "10.0.0.1")))
    assert list(apart) == ["mlx5_1", "mlx5_0"]
    flat = railed("n1", roce(0, "10.0.0.1"), roce(1, "10.0.0.2"))
    assert keys(flat) == {"mlx5_0": ("pci of 2", 0, 0), "mlx5_1": ("pci of 2", 1, 0)}


def test_roce_has_a_wiring_for_each_family_and_infiniband_one_of_its_own() -> None:
    found = wirings(known(railed("n1", ib(0, fabric="red"), roce(1, "10.0.0.1", "fd00::1"))))
    assert [(wiring.family, len(wiring.rails)) for wiring in found] == [("ib", 1), ("roce4", 1), ("roce6", 1)]
    assert [rail.fabric for wiring in found for rail in wiring.rails] == [
        "fabric red",
        "subnet 10.0.0.0/24",
        "subnet fd00::/64",
    ]


def test_only_roce_v2_gids_that_are_routed_count() -> None:
    rows = (
        Gid(0, "fe80::1", "IB/RoCE v1", "eth0"),
        Gid(1, "::ffff:10.0.0.1", "IB/RoCE v1", "eth0"),
        Gid(2, "fe80::1", "RoCE v2", "eth0"),
        Gid(3, "::ffff:169.254.7.7", "RoCE v2", "eth0"),
    )
    assert only(railed("n1", roce(0, gids=rows))).faults == (Fault("mlx5_0", "no GID to use"),)
    good = railed("n1", roce(0, gids=(*rows, Gid(4, "::ffff:10.0.0.1", "RoCE v2", "eth0"))))
    assert only(good).faults == ()


def test_a_port_whose_state_nobody_can_read_is_not_known_to_be_up() -> None:
    masked = ib(1, fabric="red", state="", unreadable=("state: permission denied",))
    found = only(railed("n1", ib(0, fabric="red"), masked))
    assert found.faults == (Fault("mlx5_1", "its state cannot be read"),)


def test_adapters_of_one_kind_should_carry_as_much_as_the_best_of_them() -> None:
    slow = ib(1, fabric="red", rate_gbps=200.0)
    assert [str(fault) for fault in only(railed("n1", ib(0, fabric="red"), slow)).faults] == ["mlx5_1: 200 of 400 Gb/s"]
    other = replace(slow, hca_type="MT4123", board="other")
    assert only(railed("n1", ib(0, fabric="red"), other)).faults == ()
    unknown = replace(slow, rate_gbps=None)
    assert only(railed("n1", ib(0, fabric="red"), unknown)).faults == ()


def test_open_problems_of_a_port_count_unless_somebody_acknowledged_them() -> None:
    made = labelled("n1", 2)
    flapping = problem("mlx5_1", "port-flapping")
    assert only(made, flapping).faults == (Fault("mlx5_1", "port-flapping: as it is", 3.0),)
    assert only(made, flapping, acknowledged=True).faults == ()
    assert only(made, problem("mlx5_1", "port-errors", Grade.WARN)).faults == ()
    assert only(made, problem("mlx5_1", "port-pcie-width", Grade.WARN)).faults == (
        Fault("mlx5_1", "port-pcie-width: as it is", 3.0),
    )
    slow = railed("n1", ib(0, fabric="red"), ib(1, fabric="red", rate_gbps=200.0))
    told = problem("mlx5_1", "port-slow", Grade.WARN)
    assert only(slow, told).faults == (Fault("mlx5_1", "200 of 400 Gb/s", 3.0),)
    assert only(slow, told, acknowledged=True).faults == ()


def test_what_an_operator_confirmed_is_what_a_node_should_have() -> None:
    """All of its ports are slow, or one was never seen: its own ports alone do not tell."""
    node = known(railed("n1", *(ib(n, fabric="red", rate_gbps=200.0) for n in range(2))))
    confirmed = Inventory(ports={"fabric ib": 3}, slowest={"fabric ib": 400.0})
    (wiring,) = wirings(attrs.evolve(node, expected=confirmed))
    assert [str(fault) for fault in wiring.faults] == [
        "ports: 2 of 3 (fabric ib) are there",
        "mlx5_0: 200 of 400 Gb/s",
        "mlx5_1: 200 of 400 Gb/s",
    ]
    assert wirings(node)[0].faults == ()
    accepted: Map[tuple[str, str], OpenProblem] = Map()
    for code in ("ports-slower", "fewer-ports"):
        told = Problem(subject="node", code=code, grade=Grade.WARN, text="")
        accepted = accepted.set(("node", code), OpenProblem(told, 3.0, 3.0, 0.0, 99.0))
    assert wirings(attrs.evolve(node, expected=confirmed, problems=accepted))[0].faults == ()


def test_a_rail_that_is_gone_is_missing_and_not_one_less_to_wait_for() -> None:
    gone = problem("mlx5_9", "port-missing")
    assert only(labelled("n1", 2), gone).faults == (Fault("mlx5_9", "missing", 3.0),)
    assert only(labelled("n1", 2), gone, acknowledged=True).faults == ()


def test_a_port_whose_lid_cannot_be_read_is_not_called_unmanaged() -> None:
    made = railed("n1", ib(0, fabric="red", lid=None, sm_lid=None, unreadable=("ports/1/lid: EINVAL",)))
    assert only(made).faults == ()


def test_the_canonical_manager_is_the_smallest_of_all_that_a_fabric_reports() -> None:
    made = [
        railed("n1", ib(0), managers=[managed(0, "0c", "0b")]),
        railed("n2", ib(0), managers=[managed(0, "0b", "0a")]),
        railed("n3", ib(0), managers=[managed(0, "0d")]),
    ]
    here = world(*made)
    canonical = fabrics(here.nodes.values())
    assert canonical == {"0a": "0a", "0b": "0a", "0c": "0a", "0d": "0d"}
    rails = [wirings(here.nodes[node.node])[0].rails[0] for node in made]
    assert [fabric_of(rail, canonical) for rail in rails] == ["SM 0a", "SM 0a", "SM 0d"]


def test_a_manager_that_did_not_answer_tells_no_fabric() -> None:
    report = PortManagers(device="mlx5_0", others=(SubnetManager(guid="0e", error="timed out"),), error="no master")
    made = railed("n1", ib(0), managers=[report])
    assert [fault.words for fault in only(made).faults] == [
        "on an unknown fabric: no subnet manager answered, and no label"
    ]


def test_what_was_found_is_kept_until_the_node_says_something_new() -> None:
    node = known(labelled("n1", 2))
    first = wirings(node)
    assert wirings(attrs.evolve(node, heard_at=99.0)) is first
    assert node.facts is not None
    other = attrs.evolve(node, facts=replace(node.facts, ports=node.facts.ports[:1]))
    assert [len(wiring.rails) for wiring in wirings(other)] == [1]
    assert [len(wiring.rails) for wiring in wirings(node)] == [2]


def test_a_node_without_adapters_has_no_wires() -> None:
    assert wirings(known(railed("n1"))) == ()
    assert wirings(attrs.evolve(known(railed("n1")), facts=None)) == ()
