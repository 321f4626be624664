"""What the kernel's log says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.kernel import Kernel, KernelEvent, Line, Reader, lines, normal_pci
from llmgw.node.view import View


def heard(*texts: str) -> list[KernelEvent]:
    reader = Reader()
    return [event for number, text in enumerate(texts) for event in reader.events(Line(100 + number / 10, text))]


def test_an_xid_line_names_gpu_and_number() -> None:
    (event,) = heard("NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    assert (event.kind, event.pci, event.xid) == ("xid", "0000:b3:00.0", 79)
    assert heard("NVRM: Xid (0000:03:00): 13, Graphics Exception")[0].pci == "0000:03:00.0"
    assert heard("NVRM: Xid (PCI:000f:01:00): 119, Timeout")[0].pci == "000f:01:00.0"


def test_three_lines_without_an_xid_are_joined_into_xid_79() -> None:
    (event,) = heard(
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "NVRM: fallen off the bus and is not responding to commands.",
    )
    assert (event.kind, event.pci, event.xid) == ("xid", "0000:b3:00.0", 79)


def test_the_lines_of_one_record_or_without_the_drivers_name_are_joined_too() -> None:
    """NV04: one message of the driver has line breaks in it; what reads the log may or may not split it."""
    first, second = "NVRM: The NVIDIA GPU 0000:b3:00.0", "(PCI ID: 10de:2330) installed in this system has"
    third = "fallen off the bus and is not responding to commands."
    for texts in ((rf"{first}\x0aNVRM: {second}\x0aNVRM: {third}",), (first, second, third)):
        (event,) = heard(*texts)
        assert (event.kind, event.pci, event.xid) == ("xid", "0000:b3:00.0", 79)
    assert heard(third) == []


def test_what_follows_an_xid_79_of_the_same_gpu_tells_nothing_new() -> None:
    events = heard(
        "NVRM: GPU at PCI:0000:1b:00: GPU-f8600eb8-f1df-acfb-fad9-d24be732714f",
        "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.",
        "NVRM: GPU 0000:1c:00.0: GPU has fallen off the bus.",
    )
    assert [(event.pci, event.xid) for event in events] == [("0000:1b:00.0", 79), ("0000:1c:00.0", 79)]
    assert "Xid" in events[0].text


def test_an_xid_of_a_mig_instance_is_its_gpus() -> None:
    (event,) = heard("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 13, pid=7, name=python, Graphics SM Warp Exception")
    assert (event.pci, event.xid) == ("0000:01:00.0", 13)


def test_a_pcie_error_is_of_the_device_and_not_of_the_bridge_that_tells_it() -> None:
    (event,) = heard("pcieport 0000:16:01.0: AER: Uncorrected (Fatal) error received: 0000:17:00.0")
    assert (event.kind, event.pci) == ("pcie-error", "0000:17:00.0")
    (event,) = heard("pcieport 0000:16:01.0: AER: Uncorrectable (Fatal) error message received from 0000:18:00.0")
    assert event.pci == "0000:18:00.0"
    (event,) = heard("pcieport 0000:16:01.0: AER: device recovery failed")
    assert event.pci == "0000:16:01.0"


def test_an_nvswitchs_error_is_fatal_or_not() -> None:
    events = heard(
        "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 12028, Non-fatal, Link 26 egress non-posted PRIV error (First)",
        "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "nvidia-nvswitch3: SXid (PCI:0000:c6:00.0): Severity 1 Engine instance 30 Sub-engine instance 00",
    )
    assert [event.kind for event in events] == ["nvswitch-error", "nvswitch-fatal"]


def test_one_line_that_says_it_all_is_xid_79_too() -> None:
    (event,) = heard("NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.")
    assert (event.pci, event.xid) == ("0000:1b:00.0", 79)


def test_a_gpu_named_long_before_is_not_blamed() -> None:
    reader = Reader()
    assert reader.events(Line(0.0, "NVRM: The NVIDIA GPU 0000:b3:00.0")) == ()
    (event,) = reader.events(Line(60.0, "NVRM: fallen off the bus and is not responding to commands."))
    assert event.pci == ""


@pytest.mark.parametrize(
    ("text", "kind", "pci"),
    [
        (
            "mlx5_core 0000:1a:00.0: poll_health:825:(pid 0): device's health compromised - reached miss count",
            "mlx5-health",
            "0000:1a:00.0",
        ),
        (
            "mlx5_core 0000:1a:00.0 ens1f0np0: print_health_info:423:(pid 0): Health issue observed, firmware internal "
            "error, severity(3) ERROR:",
            "mlx5-health",
            "0000:1a:00.0",
        ),
        ("mlx5_core 0000:5e:00.1: Port module event: module 1, Cable unplugged", "cable-unplugged", "0000:5e:00.1"),
        (
            "mlx5_core 0000:5e:00.1: Port module event[error]: module 1, Cable error, High Temperature",
            "module-error",
            "0000:5e:00.1",
        ),
        ("NVRM: GPU 0000:0b:00.0: RmInitAdapter failed! (0x26:0x56:1463)", "gpu-init-failed", "0000:0b:00.0"),
        ("Out of memory: Killed process 4242 (vllm) total-vm:1kB", "oom-kill", ""),
        ("mce: [Hardware Error]: Machine check events logged", "machine-check", ""),
    ],
)
def test_other_faults_are_known_by_their_lines(text: str, kind: str, pci: str) -> None:
    (event,) = heard(text)
    assert (event.kind, event.pci) == (kind, pci)


@pytest.mark.parametrize(
    "text",
    [
        "mlx5_core 0000:5e:00.1: Port module event: module 1, Cable plugged",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.172.08",
        "mlx5_core 0000:5e:00.1 ens1: Link up",
        "",
    ],
)
def test_ordinary_lines_say_nothing(text: str) -> None:
    assert heard(text) == []


def test_records_are_split_into_time_and_text_without_their_continuations() -> None:
    record = b"4,1234,5000000,-;NVRM: one\n SUBSYSTEM=pci\n DEVICE=+pci:0000:b3:00.0\n"
    assert list(lines(record)) == [Line(5.0, "NVRM: one")]


def test_eight_digit_domains_are_spelled_as_sysfs_does() -> None:
    assert normal_pci("00000000:1B:00.0") == "0000:1b:00.0"
    assert normal_pci("0000000F:01:00") == "000f:01:00.0"


@given(st.binary())
def test_any_bytes_are_read(record: bytes) -> None:
    reader = Reader()
    for line in lines(record):
        reader.events(line)


@given(st.lists(st.text()))
def test_any_lines_are_understood(texts: list[str]) -> None:
    heard(*texts, *(f"NVRM: {text}" for text in texts), *(f"mlx5_core 0000:1a:00.0: {text}" for text in texts))


@pytest.mark.real
async def test_the_log_is_followed_as_it_grows(tmp_path: Path, nursery: trio.Nursery) -> None:
    (tmp_path / "dev").mkdir()
    pipe = tmp_path / "dev/kmsg"
    os.mkfifo(pipe)
    send, receive = trio.open_memory_channel[KernelEvent](10)
    kernel = Kernel(View(root=tmp_path), send.send_nowait)
    writer = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    nursery.start_soon(kernel.run)
    stamp = int(time.monotonic() * 1e6)
    os.write(writer, f"4,1,{stamp},-;NVRM: Xid (PCI:0000:b3:00): 31, pid=1\n".encode())
    with trio.fail_after(60):
        assert (await receive.receive()).xid == 31
        os.write(writer, f"4,2,{stamp},-;NVRM: Xid (PCI:0000:b3:00): 48, pid=1\n".encode())
        assert (await receive.receive()).xid == 48
    os.close(writer)
    nursery.cancel_scope.cancel()


@pytest.mark.real
async def test_a_log_that_cannot_be_read_is_said_to_be_so(tmp_path: Path) -> None:
    kernel = Kernel(View(root=tmp_path), lambda event: None)
    await kernel.run()
    assert kernel.readable is False
