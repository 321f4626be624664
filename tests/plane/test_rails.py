"""Which rails the members of a replica have in common, up, at full rate and not found bad together (D6)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from llmgw.plane.world import DEFAULT
from llmgw.wire.facts import (
    HostLimits,
    Port,
)
from tests.plane.fabrics_of import (
    after_test,
    chosen,
    ib,
    labelled,
    nodes,
    railed,
    refused,
    roce,
    told,
    wanted,
)
from tests.plane.worlds import gpus, world

# --- rails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "value"),
    [
        (ib(2, fabric="red", state="DOWN", physical_state="Polling"), "mlx5_2: down"),
        (ib(2, fabric="red", state="DOWN", physical_state="Disabled"), "mlx5_2: down (disabled)"),
        (ib(2, fabric="red", state="INIT"), "mlx5_2: init"),
        (ib(2, fabric="red", rate_gbps=200.0), "mlx5_2: 200 of 400 Gb/s"),
        (ib(2, fabric="red", lid=None, sm_lid=None), "mlx5_2: no subnet manager configured it"),
    ],
)
def test_a_needed_rail_that_is_down_or_slow_keeps_the_node_out(port: Port, value: str) -> None:
    broken = railed("n2", *(ib(n, fabric="red") for n in (0, 1)), port, ib(3, fabric="red"))
    here = world(labelled("n1"), broken, labelled("n3"))
    assert nodes(here, wanted(2)) == ("n1", "n3")
    (found,) = [reason for reason in refused(here, wanted(3)) if reason.node == "n2"]
    assert (found.check, found.value, found.needed, found.age) == ("rails", value, "up at full rate", 10.0)
    assert {reason.check for reason in refused(here, wanted(3)) if reason.node != "n2"} == {"nodes"}


def test_rails_are_narrowed_to_those_in_common_where_so_many_do() -> None:
    """One adapter cannot be used on one node: refused, or narrowed and said; never a silent hang (RA06)."""
    broken = railed("n2", ib(0, fabric="red"), ib(1, fabric="red"), ib(2, fabric="red", state="DOWN"))
    here = world(labelled("n1", 3), broken)
    assert nodes(here, wanted(2)) == ()
    choice = chosen(here, wanted(2, rails=2))
    assert [member.rdma for member in choice.members] == [("mlx5_0:1", "mlx5_1:1")] * 2
    assert choice.members[0].network["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert "narrowed to the rails that all have, without n1 mlx5_2, n2 mlx5_2: down" in choice.why
    assert nodes(here, wanted(2, rails=3)) == ()
    assert [row for row in told(here, wanted(2, rails=3)) if row[0] == "n2"] == [
        ("n2", "rails", "mlx5_2: down", "up at full rate")
    ]


def test_adapters_that_no_process_may_open_are_no_rails() -> None:
    """In a container without /dev/infiniband the adapters are seen and cannot be used (RA06)."""
    shut = labelled("n2", 2)
    shut = replace(shut, host=replace(shut.host, limits=HostLimits(uverbs=False)))
    here = world(labelled("n1", 2), shut)
    assert [row for row in told(here, wanted(2, rails=1)) if row[0] == "n2"] == [
        ("n2", "rails", f"mlx5_{n}: no /dev/infiniband/uverbs* to open it by", "up at full rate") for n in range(2)
    ]


def test_an_adapter_that_cannot_be_opened_is_left_out_or_refused() -> None:
    """One of two adapters was given to the container (RA06): the other is seen and hangs whoever counts on it."""
    shut = railed(
        "n2", ib(0, fabric="red"), ib(1, fabric="red", shut="/dev/infiniband/uverbs1: Operation not permitted")
    )
    here = world(labelled("n1", 2), shut)
    words = "mlx5_1: cannot be opened: /dev/infiniband/uverbs1: Operation not permitted"
    assert [row for row in told(here, wanted(2)) if row[0] == "n2"] == [("n2", "rails", words, "up at full rate")]
    choice = chosen(here, wanted(2, rails=1))
    assert [member.rdma for member in choice.members] == [("mlx5_0:1",)] * 2
    assert "cannot be opened" in choice.why


def test_more_rails_than_a_node_has_are_too_few() -> None:
    here = world(labelled("n1", 2), labelled("n2", 2))
    assert told(here, wanted(2, rails=4)) == [
        ("n1", "rails", "2 rails", "4 rails"),
        ("n2", "rails", "2 rails", "4 rails"),
    ]


def test_a_second_adapter_next_to_a_gpu_of_one_node_is_not_guessed_to_be_the_rail() -> None:
    """A storage adapter that nobody declared, on the same fabric, before the rail in PCI order (RA01)."""
    cards = {
        name: tuple(replace(gpu, uuid=f"{name}-{gpu.index}") for gpu in gpus(2, node=name)) for name in ("n1", "n2")
    }
    extra = ib(9, fabric="red", pci="0000:01:00.0", nearest_gpus=("n2-1",))
    here = world(
        *(
            railed(
                name,
                *(ib(n, fabric="red", nearest_gpus=(f"{name}-{n}",)) for n in range(2)),
                *([extra] if name == "n2" else []),
                gpu=cards[name],  # type: ignore[arg-type]
            )
            for name in ("n1", "n2")
        )
    )
    assert nodes(here, wanted(2, gpus=2)) == ()
    assert any(
        "in the nodes' configuration which are the same" in reason.text for reason in refused(here, wanted(2, gpus=2))
    )
    assert [member.rdma for member in chosen(here, wanted(2, gpus=2, rails=1)).members] == [("mlx5_0:1",)] * 2


def test_rails_are_the_same_by_gpu_and_pci_order_never_by_name() -> None:
    """An extra adapter called mlx5_3 shifts the names on one node (RA01)."""
    near = gpus(4, node="n")

    def node(name: str, devices: tuple[str, ...], storage: str = "") -> object:
        mine = tuple(replace(gpu, uuid=f"{name}-{n}", pci=f"0000:{n + 1:02x}:00.0") for n, gpu in enumerate(near))
        ports = [ib(n, device=device, fabric="red", nearest_gpus=(f"{name}-{n}",)) for n, device in enumerate(devices)]
        extra = [ib(9, device=storage, fabric="red")] if storage else []
        return railed(name, *ports, *extra, gpu=mine)  # type: ignore[arg-type]

    names = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    here = world(node("n1", names), node("n2", ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_4"), "mlx5_3"))  # type: ignore[arg-type]
    choice = chosen(here, wanted(2, gpus=4))  # the extra adapter is next to no GPU: no rail
    assert choice.members[1].network["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1,mlx5_2:1,mlx5_4:1"


def test_rails_that_are_isolated_by_subnet_are_paired_by_it_and_never_crossed() -> None:
    here = world(
        railed("n1", roce(0, "10.0.0.1"), roce(1, "10.0.1.1")), railed("n2", roce(0, "10.0.1.2"), roce(1, "10.0.0.2"))
    )
    choice = chosen(here, wanted(2))
    assert [member.rdma for member in choice.members] == [("mlx5_0:1", "mlx5_1:1"), ("mlx5_1:1", "mlx5_0:1")]
    assert choice.members[0].network["NCCL_CROSS_NIC"] == "0"


def test_nodes_of_one_fabric_with_other_numbers_of_rails_are_told_so() -> None:
    here = world(labelled("n1", 4), labelled("n2", 2))
    assert told(here, wanted(2)) == [
        ("n1", "rails", "4 rails", "2 rails as on n2"),
        ("n2", "rails", "2 rails", "4 rails as on n1"),
    ]


def test_on_a_labelled_fabric_every_port_may_have_a_subnet_of_its_own() -> None:
    here = world(
        railed("n1", roce(0, "10.0.0.1", fabric="red"), roce(1, "10.0.1.1", fabric="red")),
        railed("n2", roce(0, "10.0.2.1", fabric="red"), roce(1, "10.0.3.1", fabric="red")),
    )
    assert nodes(here, wanted(2)) == ("n1", "n2")


# --- tests of bandwidth ----------------------------------------------------------------------------------


def test_a_pair_that_a_test_found_bad_on_a_needed_rail_is_never_chosen() -> None:
    here = after_test(world(labelled("n1"), labelled("n2"), labelled("n3")), "n1", "n2", bad=["mlx5_3"])
    assert nodes(here, wanted(2)) == ("n1", "n3")
    assert nodes(here, wanted(3)) == ()
    found, other, third = refused(here, wanted(3), now=7200.0)
    assert [(reason.node, reason.check) for reason in (found, other, third)] == [
        ("n1", "evidence"),
        ("n2", "evidence"),
        ("n3", "nodes"),
    ]
    assert (found.value, found.age) == ("12 Gb/s of 400, tested 2 h ago", 7200.0)
    assert found.text == "n1: was tested bad with n2: rail 0 bad"


def test_a_rail_that_is_not_needed_may_be_bad() -> None:
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_9"])
    assert nodes(here, wanted(2)) == ("n1", "n2")
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_3"])
    assert nodes(here, wanted(2)) == ()
    assert nodes(here, wanted(2, network="tcp")) == ("n1", "n2")


def test_with_rails_to_spare_a_bad_one_is_left_out() -> None:
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_2"])
    choice = chosen(here, wanted(2, rails=3))
    assert choice.members[0].rdma == ("mlx5_0:1", "mlx5_1:1", "mlx5_3:1")
    assert nodes(here, wanted(2, rails=4)) == ()
    three = world(*(labelled(name) for name in ("n1", "n2", "n3")))
    assert len(chosen(after_test(three, "n1", "n2", bad=["mlx5_2"]), wanted(2, rails=3)).members[0].rdma) == 4


def test_an_old_test_keeps_nobody_away() -> None:
    here = after_test(world(labelled("n1"), labelled("n2")), "n1", "n2", bad=["mlx5_3"])
    assert nodes(here, wanted(2), now=DEFAULT.evidence) == ()
    assert nodes(here, wanted(2), now=DEFAULT.evidence + 1) == ("n1", "n2")


def test_pairs_that_were_tested_good_are_preferred() -> None:
    here = after_test(world(*(labelled(f"n{n}") for n in range(1, 6))), "n3", "n5", good=["mlx5_0"])
    choice = chosen(here, wanted(2))
    assert choice.nodes == ("n3", "n5")
    assert "1 of 1 pairs tested good" in choice.why
    assert nodes(here, wanted(3)) == ("n1", "n3", "n5")
