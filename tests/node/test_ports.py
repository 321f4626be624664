"""Ports read from a made-up sysfs on disk."""

from __future__ import annotations

import os
import tempfile
import threading
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmgw.node.ports import Ports, mtus, read
from llmgw.node.problems.memory import Facts, Memory
from llmgw.node.problems.verdict import problems
from llmgw.node.view import View
from llmgw.rdma.sysfs import Unread
from llmgw.wire.facts import Gpu, Port
from tests.fakes.sysfs import REFUSES, Machine, hgx

pytestmark = pytest.mark.real


#: Adapters that are well answer at once, and a process that is frozen meanwhile is no sick adapter.
patient = partial(Ports, within=60.0)


def named(ports: tuple[Port, ...]) -> dict[str, Port]:
    return {port.device: port for port in ports}


async def test_a_machine_without_adapters_has_an_empty_inventory(tmp_path: Path) -> None:
    view = await patient(View(root=tmp_path)).look()
    assert (view.ports, view.loads, view.silent) == ((), (), {})


async def test_a_node_of_eight_rails_and_a_bond(tmp_path: Path) -> None:
    hgx(tmp_path)
    gpus = tuple(Gpu(uuid=f"GPU-{n}", pci=f"0000:{0x1B + n:02x}:00.0", numa_node=n // 4) for n in range(8))
    view = await patient(View(root=tmp_path, fabrics={"mlx5_bond_0": "store"}), lambda: gpus).look()
    ports = named(view.ports)
    assert len(ports) == 9
    assert sorted(port.rail for port in view.ports if port.rail is not None) == list(range(8))
    assert ports["mlx5_3"].rail == 0
    assert ports["mlx5_3"].nearest_gpus == ("GPU-0",)
    assert ports["mlx5_2"].nearest_gpus == ("GPU-7",)
    assert (ports["mlx5_3"].pcie_gen, ports["mlx5_3"].pcie_width, ports["mlx5_3"].numa_node) == (5, 16, 0)
    bond = ports["mlx5_bond_0"]
    assert (bond.role, bond.rail, bond.fabric, bond.kind, bond.bond) == ("storage", None, "store", "roce", "bond0")
    assert bond.rate_gbps == 200.0
    assert len(view.loads) == 9
    assert len(view.loads[0].counters) == 40


async def test_one_file_that_refuses_costs_one_counter_and_is_not_asked_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    here = machine.adapter("mlx5_0", pci="0000:18:00.0")
    machine.refuse(f"{here}/ports/1/counters/VL15_dropped")
    ports = patient(View(root=tmp_path))
    view = await ports.look()
    assert view.ports[0].state == "ACTIVE"
    assert view.ports[0].unreadable == ("counters/VL15_dropped: EINVAL",)
    assert len(view.loads[0].counters) == 39
    (tmp_path / here / "ports/1/counters/VL15_dropped").unlink()
    machine.write(f"{here}/ports/1/counters/VL15_dropped", "7")
    assert "VL15_dropped" not in (await ports.look()).loads[0].counters


async def test_an_adapter_that_this_container_was_not_given_says_so(tmp_path: Path) -> None:
    """The whole of the host's sysfs is seen, and one of two devices may be opened (RA06)."""
    machine = Machine(tmp_path)
    for number in range(2):
        machine.adapter(f"mlx5_{number}", pci=f"0000:{18 + number}:00.0")
        machine.write(f"sys/class/infiniband_verbs/uverbs{1 - number}/ibdev", f"mlx5_{number}")
    machine.write("dev/infiniband/rdma_cm", "")
    assert [port.shut for port in (await patient(View(root=tmp_path)).look()).ports] == ["", ""], (
        "of the host's to tell"
    )
    machine.write("dev/infiniband/uverbs1", "")
    view = await patient(View(root=tmp_path)).look()
    assert [port.shut for port in view.ports] == ["", "/dev/infiniband/uverbs0: No such file or directory"]


async def test_a_state_that_refuses_once_is_asked_again_at_the_next_look(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    here = machine.adapter("mlx5_0", pci="0000:0a:00.0")
    machine.refuse(f"{here}/ports/1/state")
    ports = patient(View(root=tmp_path, state=None))
    assert [load.state for load in (await ports.look()).loads] == [""]
    (tmp_path / here / "ports/1/state").unlink()
    machine.write(f"{here}/ports/1/state", "4: ACTIVE")
    assert [(load.state, load.rate_gbps) for load in (await ports.look()).loads] == [("ACTIVE", 400.0)]


async def test_an_adapter_without_attributes_hides_no_other(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.adapter("mlx5_0", pci="0000:18:00.0")
    (tmp_path / "sys/class/infiniband/irdma0/ports/1").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/hfi1_0").mkdir()
    ports = named((await patient(View(root=tmp_path)).look()).ports)
    assert ports["mlx5_0"].rate_gbps == 400.0
    assert "state: ENOENT" in ports["irdma0"].unreadable
    assert ports["irdma0"].driver == "irdma"


async def test_counters_and_states_are_read_anew_each_time(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    here = machine.adapter("mlx5_0", pci="0000:18:00.0")
    ports = patient(View(root=tmp_path))
    await ports.look()
    machine.write(f"{here}/ports/1/state", "1: DOWN")
    machine.write(f"{here}/ports/1/counters/link_downed", "3")
    (load,) = (await ports.look()).loads
    assert (load.state, load.rate_gbps, load.counters["link_downed"]) == ("DOWN", None, 3)


async def test_an_adapter_that_comes_later_is_found_and_one_that_goes_is_gone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.adapter("mlx5_0", pci="0000:18:00.0")
    ports = patient(View(root=tmp_path))
    await ports.look()
    machine.adapter("mlx5_1", pci="0000:2a:00.0")
    assert len((await ports.look()).ports) == 2
    (tmp_path / "sys/class/infiniband/mlx5_0").rename(tmp_path / "gone")
    assert [port.device for port in (await ports.look()).ports] == ["mlx5_1"]


async def test_an_adapter_whose_files_block_is_named_and_hides_no_other(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.adapter("mlx5_0", pci="0000:18:00.0")
    sick = machine.adapter("mlx5_1", pci="0000:2a:00.0")
    ports = Ports(View(root=tmp_path), within=3.0)
    await ports.look()
    pipe = tmp_path / sick / "ports/1/state"
    pipe.unlink()
    os.mkfifo(pipe)
    before = threading.active_count()
    with trio.fail_after(60):
        view = await ports.look()
        again = await ports.look()
        last = await ports.look()
    assert list(view.silent) == list(again.silent) == list(last.silent) == ["mlx5_1"]
    assert last.silent == view.silent
    assert named(last.ports)["mlx5_0"].state == "ACTIVE"
    assert named(last.ports)["mlx5_1"].state == "ACTIVE"
    assert threading.active_count() <= before + 3
    # The adapter answers again.
    with pipe.open("w") as file:
        file.write("1: DOWN\n")
    pipe.unlink()
    machine.write(f"{sick}/ports/1/state", "4: ACTIVE")
    with trio.fail_after(60):
        while (await ports.look()).silent:
            await trio.lowlevel.checkpoint()


def test_a_read_never_raises(tmp_path: Path) -> None:
    assert read(str(tmp_path)) == Unread("EISDIR")
    assert read(str(tmp_path / "absent")) == Unread("ENOENT")
    assert read("nul\0") == Unread("EINVAL")
    assert read(str(REFUSES)) == Unread("EINVAL")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\0ok")
    assert read(str(tmp_path / "bytes")) == "��ok"


states = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [b"4: ACTIVE", b"1: DOWN", b"InfiniBand", b"Ethernet", b"400 Gb/sec (4X NDR)", b"0x5", b"mlx5_core"]
    ),
)
DEVICES = ("mlx5_0", "rxe0", "efa_0")
trees = st.dictionaries(
    st.sampled_from(
        [
            *(f"{device}/{name}" for device in DEVICES for name in ("node_guid", "node_type", "parent")),
            *(
                f"{device}/ports/{number}/{name}"
                for device in DEVICES
                for number in ("1", "2", "x")
                for name in (
                    "state", "phys_state", "rate", "link_layer", "lid", "sm_lid", "gids/0", "gids/1", "gids/x",
                    "gid_attrs/types/1", "gid_attrs/ndevs/1", "counters/link_downed", "hw_counters/out_of_buffer",
                    "counters",
                )
            ),
        ]
    ),
    states,
    max_size=25,
)  # fmt: skip


@hypothesis_settings(max_examples=60)
@given(trees)
def test_any_files_in_place_of_sysfs_give_facts_and_problems_and_never_an_exception(tree: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for path, data in tree.items():
            file = Path(folder) / "sys/class/infiniband" / path
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
            except (FileExistsError, NotADirectoryError, IsADirectoryError):
                continue  # a name that is a file in one entry and a folder in another
        ports = patient(View(root=Path(folder)))
        trio.run(ports.look)
        view = trio.run(ports.look)
        verdict = problems(Facts(ports=view), Memory(), 1.0)
        assert len(view.loads) == len(view.ports)
        assert all(problem.text for problem in verdict.problems)


async def test_a_missing_tool_tells_no_mtu() -> None:
    assert await mtus("/nonexistent/ibv_devinfo") == {}
