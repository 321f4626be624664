import os
import signal
from pathlib import Path

import pytest
import trio

from llmgw.node import processes
from llmgw.node.launch import confined, launch, scopes_work
from llmgw.node.processes import Handle, Seen
from tests.engines import until

pytestmark = pytest.mark.real


async def ended(seen: Seen) -> tuple[int | None, int | None]:
    with Handle(seen.pid) as handle:
        with trio.fail_after(60):
            await handle.ended()
        return handle.reap()


async def test_the_engine_runs_only_after_its_record_and_keeps_the_number_recorded(tmp_path: Path) -> None:
    log, recorded = tmp_path / "log", list[tuple[Seen, str]]()

    def record(seen: Seen) -> None:
        recorded.append((seen, log.read_text()))

    seen = launch(["sh", "-c", "echo $$"], dict(os.environ), "/", log, record)
    assert await ended(seen) == (0, None)
    assert recorded == [(seen, "")]
    assert log.read_text() == f"{seen.pid}\n"
    assert seen.session == seen.group == seen.pid


async def test_a_record_that_cannot_be_written_means_that_nothing_runs(tmp_path: Path) -> None:
    pids = list[int]()

    def fail(seen: Seen) -> None:
        pids.append(seen.pid)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        launch(["touch", str(tmp_path / "ran")], dict(os.environ), "/", tmp_path / "log", fail)
    assert processes.look(pids[0]) is None
    assert not (tmp_path / "ran").exists()


def name_of(pid: int) -> str:
    seen = processes.look(pid)
    return seen.name if seen is not None else ""


async def test_a_hangup_does_not_end_an_engine(tmp_path: Path) -> None:
    seen = launch(["sleep", "100"], dict(os.environ), "/", tmp_path / "log", lambda seen: None)
    await until(lambda: name_of(seen.pid) == "sleep")
    os.kill(seen.pid, signal.SIGHUP)
    os.kill(seen.pid, signal.SIGTERM)
    assert await ended(seen) == (None, signal.SIGTERM)


async def test_a_program_that_is_not_there_ends_with_127_and_says_so(tmp_path: Path) -> None:
    seen = launch(["/no/such/program"], dict(os.environ), "/", tmp_path / "log", lambda seen: None)
    assert await ended(seen) == (127, None)
    assert "/no/such/program" in (tmp_path / "log").read_text()


def systemd_run(folder: Path, *, works: bool) -> dict[str, str]:
    """A stand-in for systemd-run: notes its words, and executes what comes after "--" as the real one does."""
    program = folder / "systemd-run"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {folder}/asked\n'
        + ('while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n' if works else "exit 1\n")
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "INVOCATION_ID": "x"}


def test_scopes_are_used_only_by_a_unit_and_where_systemd_makes_them(tmp_path: Path) -> None:
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    good = systemd_run(tmp_path / "good", works=True)
    assert scopes_work(good)
    assert "--scope" in (tmp_path / "good" / "asked").read_text()
    assert not scopes_work({"PATH": good["PATH"]})
    assert not scopes_work(systemd_run(tmp_path / "bad", works=False))


@pytest.mark.parametrize(
    ("said", "ends"),
    [("echo control-group", True), ("echo mixed", True), ("echo process", False), ("exit 1", True)],
)
def test_engines_in_the_agents_own_unit_end_with_it_unless_its_killmode_spares_them(
    tmp_path: Path, said: str, ends: bool
) -> None:
    """KillMode=mixed ends the rest of the unit as well (SD02)."""
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\n[ "$1" = show ] || exit 1\n{said}\n')
    (tmp_path / "systemctl").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "INVOCATION_ID": "x"}
    assert confined("llmgw-node.service", False, env) is ends
    assert confined("llmgw-node.service", True, env), "another systemd is asked, which cannot tell"
    assert not confined("llmgw-node.service", False, {"PATH": env["PATH"]}), "it is no unit"
    assert not confined("", False, env)


@pytest.mark.parametrize(
    ("cgroup", "service"),
    [
        ("0::/system.slice/llmgw-node.service\n", ("llmgw-node.service", False)),
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/llmgw.service\n", ("llmgw.service", True)),
        ("0::/user.slice/user-7.slice/user@7.service/app.slice/terminal-1.scope\n", ("", False)),
        ("12:pids:/docker/abc\n1:name=systemd:/docker/abc\n", ("", False)),
        ("0::/\n", ("", False)),
    ],
)
def test_whose_service_this_process_is_stands_in_its_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, service: tuple[str, bool]
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(cgroup)
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert processes.service_of_own() == service


async def test_inside_a_scope_the_number_is_still_the_one_recorded(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    env = systemd_run(tmp_path / "bin", works=True)
    scope = (str(tmp_path / "bin" / "systemd-run"), "--scope", "--unit=llmgw-engine-x.scope", "--")
    seen = launch(["sh", "-c", "echo $$"], env, "/", tmp_path / "log", lambda seen: None, scope)
    assert await ended(seen) == (0, None)
    assert (tmp_path / "log").read_text() == f"{seen.pid}\n"
