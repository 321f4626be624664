"""A node examined by itself: on the machine at hand, on made-up ones, and on ones that are broken."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio

from llmgw.errors import BadInput
from llmgw.node.doctor import check
from llmgw.node.doctor import patient as patients
from llmgw.node.doctor.check import FAIL, PASS, SKIPPED, WARN, Check, ok
from llmgw.node.doctor.patient import Patient
from llmgw.node.doctor.run import all_checks, chosen, doctor, exit_status, findings
from llmgw.node.ports import Ports
from llmgw.node.problems.memory import Facts
from llmgw.node.settings import NodeSettings
from llmgw.wire.control import DoctorReply, Finding
from tests.fakes.nvml import Driver
from tests.fakes.sysfs import Machine, hgx
from tests.ports import free_ports

pytestmark = pytest.mark.real

LONGEST = patients.WITHIN + check.WITHIN  # as the doctor has them, and not these tests


def settings(root: Path, **more: object) -> NodeSettings:
    return NodeSettings(root=root, directory=root / "state", **more)  # type: ignore[arg-type]


def by_check(reply: DoctorReply) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in reply.findings:
        found.setdefault(finding.check, []).append(finding)
    return found


def outcomes(reply: DoctorReply) -> dict[str, str]:
    return {name: each[0].outcome for name, each in by_check(reply).items()}


def machine(root: Path) -> Machine:
    """Eight GPUs and nine ports, set up well."""
    made = hgx(root)
    (root / "state").mkdir()
    made.write("proc/meminfo", "MemTotal: 2000000000 kB\nMemAvailable: 1900000000 kB\nHugePages_Total: 0\n"
               "Hugepagesize: 2048 kB")  # fmt: skip
    made.write("proc/sys/kernel/osrelease", "6.8.0-45-generic")
    made.write("proc/sys/kernel/random/boot_id", "boot-1")
    made.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08")
    made.write("run/nvidia-persistenced/nvidia-persistenced.pid", "7")
    for name in ("infiniband/uverbs0", "infiniband/umad0", "nvidiactl", "nvidia-uvm", "nvidia0", "kmsg", "shm/.x"):
        made.write(f"dev/{name}", "")
    return made


async def examine(root: Path, driver: Driver, only: Sequence[str] = ()) -> DoctorReply:
    with trio.fail_after(120):
        return await doctor(settings(root), only, probe=driver.probe)


def test_there_are_many_checks_with_stable_ids() -> None:
    names = [check.id for check in all_checks()]
    assert len(names) == len(set(names)) >= 30
    assert all(re.fullmatch(r"(host|gpu|rdma|agent)\.[a-z-]+", name) for name in names)
    assert [name.partition(".")[0] for name in names] == sorted(
        (name.partition(".")[0] for name in names), key=["host", "gpu", "rdma", "agent"].index
    )


def test_less_than_ten_seconds_are_waited_for_a_node_on_which_everything_hangs() -> None:
    assert LONGEST < 10


async def test_the_machine_at_hand_is_examined_and_every_check_says_something(tmp_path: Path) -> None:
    reply = await doctor(NodeSettings(directory=tmp_path))
    assert {finding.check for finding in reply.findings} == {check.id for check in all_checks()}
    assert all(finding.text for finding in reply.findings)
    assert all(finding.remedy for finding in reply.findings if finding.outcome in (WARN, FAIL))


async def test_a_machine_whose_files_are_all_missing_is_examined_without_a_failing_check_of_our_own(
    tmp_path: Path,
) -> None:
    reply = await doctor(settings(tmp_path))
    assert not [finding for finding in reply.findings if "the check itself failed" in finding.text]


async def test_a_node_that_is_well_passes(tmp_path: Path) -> None:
    machine(tmp_path)
    reply = await examine(tmp_path, Driver(tmp_path, "gpus 8", "links 18"), ["gpu", "rdma"])
    found = outcomes(reply)
    assert {name: outcome for name, outcome in found.items() if outcome not in (PASS, SKIPPED)} in (
        {},
        {"rdma.tools": WARN},
    )
    assert found["gpu.count"] == found["gpu.nvlink"] == found["rdma.state"] == found["rdma.affinity"] == PASS
    count = by_check(reply)["gpu.count"][0]
    assert count.numbers == {"usable": 8, "on_the_bus": 8, "known": 8}
    assert "9 of 9 ports are active" in by_check(reply)["rdma.state"][0].text


async def test_each_broken_part_fails_its_own_check_with_subject_and_remedy(tmp_path: Path) -> None:
    made = machine(tmp_path)
    made.write("sys/class/infiniband/mlx5_4/ports/1/state", "1: DOWN")
    made.write("sys/class/infiniband/mlx5_4/ports/1/phys_state", "2: Polling")
    made.write("sys/class/infiniband/mlx5_2/ports/1/rate", "200 Gb/sec (2X NDR)")
    made.write("dev/kmsg", f"4,1,{int(time.monotonic() * 1e6)},-;NVRM: Xid (PCI:0000:1d:00): 48, pid=1")
    driver = Driver(tmp_path, "gpus 8", "remap 5 0 1 1 0", "linkdown 6 2", "fail nvmlDeviceGetUtilizationRates 3 15")
    found = by_check(await examine(tmp_path, driver))
    assert [(each.outcome, each.subject) for each in found["rdma.state"]] == [(WARN, "port:mlx5_4/1")]
    assert [(each.outcome, each.subject) for each in found["rdma.rate"]] == [(WARN, "port:mlx5_2/1")]
    assert found["gpu.count"][0].outcome == FAIL
    assert "0000:1e:00.0" in found["gpu.count"][0].text
    assert found["gpu.remap"][0].outcome == FAIL
    assert found["gpu.remap"][0].subject.endswith("-000000000000")
    assert "the other six 18" in found["gpu.nvlink"][0].text
    assert "Xid 48" in found["gpu.xid"][0].text
    assert exit_status(DoctorReply(findings=tuple(found["gpu.remap"]))) == 2


async def test_a_driver_that_hangs_fails_one_check_and_the_rest_go_on(tmp_path: Path) -> None:
    machine(tmp_path)
    driver = Driver(tmp_path, "gpus 8", "hang nvmlInitWithFlags -1")
    with trio.fail_after(120):
        reply = await doctor(settings(tmp_path), probe=lambda: driver.probe(first_within=1))
    found = outcomes(reply)
    assert found["gpu.driver"] == FAIL
    assert found["gpu.ecc"] == SKIPPED
    assert found["rdma.state"] == PASS
    assert "hangs" in by_check(reply)["gpu.driver"][0].text or "not answering" in by_check(reply)["gpu.driver"][0].text


@pytest.mark.parametrize("hanging", [1, 9])
async def test_adapters_that_do_not_answer_are_named_and_the_others_are_examined(
    tmp_path: Path, hanging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmgw.node.doctor.patient.WITHIN", 5.5)  # all of it is waited
    machine(tmp_path)
    names = sorted(path.name for path in (tmp_path / "sys/class/infiniband").iterdir())
    for name in names[:hanging]:
        pipe = tmp_path / "sys/class/infiniband" / name / "ports/1/state"
        pipe.unlink()
        os.mkfifo(pipe)
    found = by_check(await examine(tmp_path, Driver(tmp_path, "gpus 8"), ["rdma"]))
    failed = [finding for finding in found["rdma.adapters"] if finding.outcome == FAIL]
    assert [finding.text.partition(":")[0] for finding in failed] == names[:hanging]
    (state,) = found["rdma.state"]
    if hanging == 1:
        assert state.text == f"8 of 8 ports are active; not known of {names[0]}: see rdma.adapters"
    else:
        assert (state.outcome, state.text) == (SKIPPED, "the RDMA adapters do not answer: see rdma.adapters")


async def test_adapters_that_a_frozen_process_has_not_read_are_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def frozen(_: Ports) -> None:
        time.sleep(1.1)  # noqa: ASYNC251 - that is it
        await trio.lowlevel.checkpoint()

    monkeypatch.setattr("llmgw.node.doctor.patient.WITHIN", 1.0)
    monkeypatch.setattr(Ports, "_read", frozen)
    machine(tmp_path)
    found = by_check(await examine(tmp_path, Driver(tmp_path, "gpus 8"), ["rdma"]))
    assert {finding.outcome for finding in found["rdma.adapters"]} == {FAIL}
    assert found["rdma.state"][0].text == "the RDMA adapters do not answer: see rdma.adapters"


async def test_a_driver_of_another_version_is_named(tmp_path: Path) -> None:
    machine(tmp_path)
    reply = await examine(tmp_path, Driver(tmp_path, "fail nvmlInitWithFlags -1 18"), ["gpu"])
    assert by_check(reply)["gpu.driver"][0].outcome == FAIL
    assert "differ in version" in by_check(reply)["gpu.driver"][0].text


async def test_a_crashing_driver_is_named_by_its_signal(tmp_path: Path) -> None:
    machine(tmp_path)
    reply = await examine(tmp_path, Driver(tmp_path, "crash nvmlDeviceGetName 0"), ["gpu.driver"])
    assert by_check(reply)["gpu.driver"][0].outcome == FAIL
    assert "SIGSEGV" in by_check(reply)["gpu.driver"][0].text


async def test_missing_management_devices_are_not_a_missing_subnet_manager(tmp_path: Path) -> None:
    machine(tmp_path)
    (tmp_path / "dev/infiniband/umad0").unlink()
    reply = await examine(tmp_path, Driver(tmp_path, "gpus 8"), ["rdma.umad", "rdma.verbs"])
    umad = by_check(reply)["rdma.umad"][0]
    assert umad.outcome == WARN
    assert umad.text.startswith("cannot ask the subnet manager")
    assert "ib_umad" in umad.remedy
    assert outcomes(reply)["rdma.verbs"] == PASS


async def test_a_plane_that_listens_passes_and_one_that_does_not_fails(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    mine = settings(tmp_path, planes=(f"wss://127.0.0.1:{port}",))
    (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
    async with listener:
        assert outcomes(await doctor(mine, ["agent.plane"]))["agent.plane"] == PASS
    reply = await doctor(mine, ["agent.plane"])
    assert outcomes(reply)["agent.plane"] == FAIL
    assert f"127.0.0.1:{port}" in reply.findings[0].text


async def test_a_node_that_never_joined_is_skipped_and_a_broken_identity_fails(tmp_path: Path) -> None:
    mine = settings(tmp_path)
    assert outcomes(await doctor(mine, ["agent.identity"]))["agent.identity"] == SKIPPED
    (tmp_path / "state").mkdir()
    for name in ("identity.pem", "ca.pem"):
        (tmp_path / "state" / name).write_text("junk")
        (tmp_path / "state" / name).chmod(0o600)
    assert outcomes(await doctor(mine, ["agent.identity"]))["agent.identity"] == FAIL


def test_checks_are_chosen_by_id_or_group_and_a_wrong_name_is_told_the_near_one() -> None:
    assert [check.id for check in chosen(["gpu.ecc"])] == ["gpu.ecc"]
    assert {check.id.partition(".")[0] for check in chosen(["rdma", "host"])} == {"host", "rdma"}
    with pytest.raises(BadInput, match=r"did you mean gpu\.ecc\?"):
        chosen(["gpu.ec"])


@pytest.fixture
def patient(tmp_path: Path) -> Patient:
    mine = settings(tmp_path)
    return Patient(settings=mine, view=mine.view, facts=Facts())


async def test_a_check_that_throws_is_its_own_finding_and_nobody_elses(patient: Patient) -> None:
    def broken(_: Patient) -> Sequence[Finding]:
        raise ZeroDivisionError("rate 0")

    def fine(_: Patient) -> Sequence[Finding]:
        return [ok("well")]

    found = await findings([Check("a.broken", broken), Check("a.fine", fine)], patient)
    assert [(each.check, each.outcome) for each in found] == [("a.broken", SKIPPED), ("a.fine", PASS)]
    assert "ZeroDivisionError: rate 0" in found[0].text


async def test_a_check_that_hangs_fails_by_its_deadline(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.node.doctor.check.WITHIN", 0.2)

    async def stuck(_: Patient) -> Sequence[Finding]:
        await trio.sleep(60)
        return []

    (found,) = await findings([Check("a.stuck", stuck)], patient)
    assert (found.outcome, found.check) == (FAIL, "a.stuck")


async def test_parts_that_did_not_answer_are_named(patient: Patient) -> None:
    late = attrs.evolve(patient, missed=("host", "ports"))
    (found,) = await findings(chosen(["host.answers"]), late)
    assert found.outcome == FAIL
    assert "host, ports" in found.text


def test_the_exit_status_is_the_worst_outcome() -> None:
    def reply(*outcomes: str) -> DoctorReply:
        return DoctorReply(findings=tuple(Finding(check="a.b", outcome=each, text="") for each in outcomes))

    assert exit_status(reply()) == 0
    assert exit_status(reply(PASS, SKIPPED)) == 0
    assert exit_status(reply(PASS, WARN)) == 1
    assert exit_status(reply(WARN, FAIL)) == 2


def test_every_check_is_in_the_handbook() -> None:
    page = (Path(__file__).parents[3] / "docs/health.md").read_text()
    assert [check.id for check in all_checks() if f"`{check.id}`" not in page] == []
