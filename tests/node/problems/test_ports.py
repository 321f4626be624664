"""What is wrong with ports."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.kernel import KernelEvent
from llmgw.node.ports import PortView
from llmgw.node.problems.memory import Facts, Memory, Verdict
from llmgw.node.problems.verdict import problems
from llmgw.wire.facts import Gid, Grade, Host, Port, PortLoad, Problem

UP = ("ACTIVE", "LinkUp", 400.0)
POLLING = ("DOWN", "Polling", None)


def port(number: int, **more: object) -> Port:
    return Port(
        device=f"mlx5_{number}",
        kind="ib",
        role=str(more.pop("role", "fabric")),
        pci=f"0000:{number + 16:02x}:00.0",
        lid=number + 1,
        **{"pcie_width": 16, "pcie_gen": 5, **more},  # type: ignore[arg-type]
    )


def facts(
    states: dict[int, tuple[str, str, float | None]] | None = None,
    counters: dict[int, dict[str, int]] | None = None,
    ports: tuple[Port, ...] | None = None,
    **more: object,
) -> Facts:
    """Eight rails that are up, but for those named."""
    eight = ports if ports is not None else tuple(port(n) for n in range(8))
    loads = []
    for n, each in enumerate(eight):
        state, physical, rate = (states or {}).get(n, UP)
        loads.append(PortLoad(each.device, each.number, state, physical, rate, None, (counters or {}).get(n, {})))
    return Facts(host=Host(boot_id="boot"), ports=PortView(at=0.0, ports=eight, loads=tuple(loads)), **more)  # type: ignore[arg-type]


def verdict(*looks: tuple[float, Facts]) -> Verdict:
    result = Verdict((), Memory())
    for now, seen in looks:
        result = problems(seen, result.memory, now)
    return result


def found(*looks: tuple[float, Facts]) -> dict[str, Problem]:
    return {f"{each.subject} {each.code}": each for each in verdict(*looks).problems}


def test_eight_rails_that_are_up_have_no_problems() -> None:
    assert found((0, facts())) == {}


def test_a_port_slower_than_its_peers_is_named_with_both_numbers() -> None:
    only = found((0, facts({4: ("ACTIVE", "LinkUp", 200.0)})))
    assert only["port:mlx5_4/1 port-slow"].text == "mlx5_4: 200 Gb/s, the other seven 400"


def test_a_storage_port_is_compared_with_its_own_kind_only() -> None:
    ports = (*(port(n) for n in range(4)), port(8, role="storage"))
    assert found((0, facts({4: ("ACTIVE", "LinkUp", 100.0)}, ports=ports))) == {}


def test_a_rail_that_goes_down_is_bad_at_once_and_polling_says_no_cable() -> None:
    only = found((0, facts()), (5, facts({4: POLLING})))
    problem = only["port:mlx5_4/1 port-down"]
    assert problem.grade is Grade.BAD
    assert "Polling" in problem.text
    assert "seven of its seven peers are up" in problem.text
    assert "cable" in problem.remedy


def test_a_port_down_by_administration_has_a_reason_of_its_own() -> None:
    only = found((0, facts()), (5, facts({4: ("DOWN", "Disabled", None)})))
    assert list(only) == ["port:mlx5_4/1 port-disabled"]
    assert "administration" in only["port:mlx5_4/1 port-disabled"].text


def test_a_rail_never_seen_up_is_expected_up_only_if_most_of_its_peers_are() -> None:
    assert found((0, facts({4: POLLING})))["port:mlx5_4/1 port-down"].grade is Grade.WARN
    half = found((0, facts(dict.fromkeys(range(4, 8), POLLING))))
    assert {problem.grade for problem in half.values()} == {Grade.NOTE}


def test_a_link_that_stays_away_for_minutes_was_dropped() -> None:
    down = facts({4: POLLING})
    problem = found((0, facts()), (5, down), (306, down))["port:mlx5_4/1 port-down"]
    assert "dropped for 5 min" in problem.text


def test_a_link_that_returns_is_cleared_after_a_clean_minute() -> None:
    down = (5, facts({4: POLLING}))
    assert "port:mlx5_4/1 port-down" in found((0, facts()), down, (10, facts()), (69, facts()))
    assert found((0, facts()), down, (10, facts()), (71, facts())) == {}


def test_three_downs_in_ten_minutes_are_flapping_and_it_sticks() -> None:
    looks = [(float(at), facts({4: POLLING} if at % 60 == 30 else None)) for at in range(0, 180, 30)]
    flapping = found(*looks)["port:mlx5_4/1 port-flapping"]
    assert "3 times in 10 min" in flapping.text
    assert flapping.grade is Grade.BAD
    assert "port:mlx5_4/1 port-flapping" in found(*looks, (1200.0, facts()))
    assert "port:mlx5_4/1 port-flapping" not in found(*looks, (700.0, facts()), (1301.0, facts()))


def test_downs_between_two_looks_are_known_by_the_counter() -> None:
    def counted(count: int) -> Facts:
        return facts(counters={4: {"link_downed": count}})

    assert "port:mlx5_4/1 port-flapping" in found((0, counted(7)), (5, counted(10)))
    assert found((0, counted(7)), (5, counted(7))) == {}


def test_a_counter_that_was_reset_or_stands_at_its_ceiling_is_no_flap() -> None:
    def counted(count: int) -> Facts:
        return facts(counters={4: {"link_downed": count}})

    assert found((0, counted(200)), (5, counted(3))) == {}
    assert list(found((0, counted(200)), (5, counted(255)))) == ["port:mlx5_4/1 port-counters-full"]


def test_error_counters_are_judged_by_growth_and_told_with_the_raw_numbers() -> None:
    def counted(count: int) -> Facts:
        return facts(counters={4: {"symbol_error": count}})

    assert found((0, counted(60_000)), (600, counted(60_010))) == {}
    problem = found((0, counted(0)), (600, counted(500)))["port:mlx5_4/1 port-errors"]
    assert "symbol_error grew by 500 in 10 min (limit 120/h)" in problem.text


def test_congestion_is_no_fault() -> None:
    def counted(count: int) -> Facts:
        return facts(counters={4: {"port_xmit_wait": count, "np_cnp_sent": count}})

    assert found((0, counted(0)), (600, counted(10**9))) == {}


def test_a_link_without_a_subnet_manager_is_told_after_a_while() -> None:
    waiting = facts({4: ("INIT", "LinkUp", 400.0)})
    assert found((0, waiting)) == {}
    assert "port:mlx5_4/1 port-no-manager" in found((0, waiting), (20, waiting))


def test_ethernet_and_omni_path_that_wait_to_be_active_are_told_after_a_while_too() -> None:
    kinds = (("roce", "port-down"), ("opa", "port-no-manager"))
    for kind, code in kinds:
        waiting = facts({0: ("INIT", "LinkUp", 100.0)}, ports=(msgspec.structs.replace(port(0), kind=kind),))
        assert found((0, waiting)) == {}
        assert set(found((0, waiting), (20, waiting))) == {f"port:mlx5_0/1 {code}"}


def test_the_remedy_of_a_port_that_is_down_goes_by_its_physical_state_and_its_kind() -> None:
    def remedy(physical: str, **more: object) -> str:
        one = msgspec.structs.replace(port(0), **more)
        (only,) = found((0, facts({0: ("DOWN", physical, None)}, ports=(one,)))).values()
        return only.remedy

    assert "no cable" in remedy("Polling")
    assert "no cable" not in remedy("LinkErrorRecovery")
    assert "no cable" not in remedy("PortConfigurationTraining")
    assert remedy("Disabled", number=2) == "ibportstate -C mlx5_0 -P 2 -D 0 2 enable"
    assert remedy("Disabled", kind="roce", netdev="eth0") == "ip link set eth0 up"
    assert remedy("LinkUp", kind="efa", netdev="ens32").startswith("ip link set ens32 up")


def test_counters_of_an_ethernet_port_are_not_reset_with_an_infiniband_tool() -> None:
    full = {0: {"excessive_buffer_overrun_errors": 15}}
    one = msgspec.structs.replace(port(0), kind="roce", gids=(Gid(3, "::ffff:10.0.0.1", "RoCE v2"),))
    assert "perfquery" in found((0, facts(counters=full, ports=(port(0),))))["port:mlx5_0/1 port-counters-full"].remedy
    told = found((0, facts(counters=full, ports=(one,))))["port:mlx5_0/1 port-counters-full"]
    assert "perfquery" not in told.remedy


def test_an_unread_lid_is_not_told_as_a_missing_one() -> None:
    blind = msgspec.structs.replace(port(0), lid=None, unreadable=("lid: ENOENT",))
    assert set(found((0, facts(ports=(blind,))))) == {"port:mlx5_0/1 port-unreadable"}


def test_an_adapter_that_nobody_here_may_open_is_told() -> None:
    shut = msgspec.structs.replace(port(0), shut="/dev/infiniband/uverbs0: Operation not permitted")
    (problem,) = found((0, facts(ports=(shut,)))).values()
    assert (problem.code, problem.grade) == ("port-shut", Grade.WARN)
    assert "uverbs0" in problem.text
    (problem,) = found((0, facts(ports=(shut, port(1))))).values()
    assert problem.grade is Grade.NOTE, "as in a container that was given another adapter"


def test_an_adapter_that_vanishes_is_missed_and_one_that_hangs_is_named() -> None:
    seven = facts(ports=tuple(port(n) for n in range(7)))
    only = found((0, facts()), (5, seven))
    assert only["port:mlx5_7/1 port-missing"].grade is Grade.BAD
    silent = facts()
    view = PortView(at=0.0, ports=silent.ports.ports, loads=silent.ports.loads, silent={"mlx5_2": 0.0})
    assert "port:mlx5_2/1 adapter-silent" in found((30, Facts(host=Host(boot_id="boot"), ports=view)))


def test_an_active_roce_rail_without_an_address_says_which_interface() -> None:
    bare = Port(device="mlx5_0", kind="roce", netdev="eth1", state="ACTIVE", gids=())
    problem = found((0, facts(ports=(bare,))))["port:mlx5_0/1 port-no-gid"]
    assert "no IP on eth1" in problem.text
    good = msgspec.structs.replace(bare, gids=(Gid(3, "::ffff:10.0.0.1", "RoCE v2", "eth1"),), mtu=4096)
    assert found((0, facts(ports=(good,)))) == {}


def test_a_roce_rail_with_link_local_gids_only_is_noted() -> None:
    """GI06: a program that takes one of them times out where routers are between."""
    rails = tuple(
        msgspec.structs.replace(
            port(n), kind="roce", netdev=f"eth{n}", gids=(Gid(1, f"fe80::{n + 1}", "RoCE v2", f"eth{n}"), *more)
        )
        for n, more in enumerate(((), (Gid(3, "::ffff:10.0.0.1", "RoCE v2", "eth1"),)))
    )
    problems = found((0, facts(ports=rails)))
    assert set(problems) == {"port:mlx5_0/1 port-link-local"}
    only = problems["port:mlx5_0/1 port-link-local"]
    assert only.grade is Grade.NOTE
    assert "fe80::1 at index 1" in only.text


def test_virtual_functions_are_left_alone() -> None:
    ports = (*(port(n) for n in range(7)), port(7, role="vf", vf=True))
    assert found((0, facts({7: ("DOWN", "Disabled", None)}, ports=ports))) == {}


def test_what_the_kernel_says_of_an_adapter_is_its_ports_problem() -> None:
    event = KernelEvent(0.0, "mlx5-health", "mlx5_core 0000:14:00.0: device's health compromised", "0000:14:00.0")
    assert list(found((5, facts(events=(event,))))) == ["port:mlx5_4/1 mlx5-health"]


def test_one_odd_firmware_among_eight_is_noted() -> None:
    ports = tuple(port(n, board="MT_838", firmware="28.39.1" if n != 4 else "28.36.2") for n in range(8))
    problem = found((0, facts(ports=ports)))["port:mlx5_4/1 port-odd-firmware"]
    assert problem.grade is Grade.NOTE
    assert "the other seven 28.39.1" in problem.text


def test_a_new_boot_begins_with_a_clean_memory() -> None:
    before = verdict((0, facts()), (5, facts({4: POLLING}))).memory
    rebooted = msgspec.structs.replace(before, boot="yesterday")
    result = problems(facts({4: POLLING}), rebooted, 5)
    assert {each.grade for each in result.problems} == {Grade.WARN}


states = st.sampled_from([UP, POLLING, ("INIT", "LinkUp", None), ("", "", None), ("DOWN", "Disabled", None)])
look = st.tuples(
    st.floats(0, 4000),
    st.dictionaries(st.integers(0, 7), states, max_size=8),
    st.dictionaries(
        st.integers(0, 7),
        st.dictionaries(st.sampled_from(["link_downed", "symbol_error", "x"]), st.integers(0, 2**64)),
        max_size=3,
    ),
)


@given(st.lists(look, max_size=8))
def test_any_history_gives_a_set_of_problems_and_a_memory_that_can_be_written_down(
    looks: list[tuple[float, dict[int, tuple[str, str, float | None]], dict[int, dict[str, int]]]],
) -> None:
    now, result = 0.0, Verdict((), Memory())
    for step, states_now, counters in looks:
        now += step
        result = problems(facts(states_now, counters), result.memory, now)
        names = [(each.subject, each.code) for each in result.problems]
        assert len(names) == len(set(names))
        assert msgspec.json.decode(msgspec.json.encode(result.memory), type=Memory) == result.memory
