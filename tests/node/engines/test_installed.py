import sys
from pathlib import Path

import pytest

from llmgw.errors import Failed, NotFound
from llmgw.node.engines import Found
from llmgw.node.engines.installed import AGAIN, Installed, Tried
from llmgw.node.engines.llamacpp import LlamaCpp
from llmgw.node.engines.places import Whereabouts, whereabouts
from llmgw.node.engines.vllm import Vllm
from llmgw.wire.facts import InstallState
from tests.engines import until
from tests.leftovers import marked

pytestmark = pytest.mark.real


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


async def test_a_working_llama_cpp_is_found_tried_and_listed(tmp_path: Path) -> None:
    installed = Installed([LlamaCpp(), Vllm()], state=tmp_path)
    await installed.look()
    (install,) = [one for one in installed.installs if one.engine == "llamacpp"]
    assert install.state is InstallState.INSTALLED
    assert install.version != ""
    assert installed.changed.value >= 1


async def test_a_build_for_another_cpu_is_found_out_by_loading_a_model(tmp_path: Path) -> None:
    text = (
        "import os, signal, sys\n"
        "if '--version' in sys.argv: print('version: 77 (abc)'); sys.exit()\n"
        "print('AMX is not ready to be used!', flush=True); os.kill(os.getpid(), signal.SIGILL)"
    )
    installed = Installed([LlamaCpp()], commands={"llamacpp": [program(tmp_path, "llama", text)]}, state=tmp_path)
    with pytest.raises(Failed, match="instructions that this CPU lacks"):
        await installed.found("llamacpp")
    assert [install.state for install in installed.installs] == [InstallState.FAILED]


async def test_a_program_that_is_tried_once_is_not_tried_again_until_it_is_replaced(tmp_path: Path) -> None:
    count = tmp_path / "count"
    text = f"open({str(count)!r}, 'a').write('x'); raise SystemExit(1)"
    installed = Installed([LlamaCpp()], commands={"llamacpp": [program(tmp_path, "llama", text)]}, state=tmp_path)
    for _ in range(2):
        with pytest.raises(Failed):
            await installed.found("llamacpp")
    assert count.read_text() == "x"
    program(tmp_path, "llama", text + " # another")
    with pytest.raises(Failed):
        await installed.found("llamacpp")
    assert count.read_text() == "xx"


def test_what_failed_counts_for_a_while_and_what_works_for_good() -> None:
    place = Whereabouts(("/bin/x",))
    broken, works = Tried((1,), place, Failed("too slow"), 100.0), Tried((1,), place, Found("x", ("/bin/x",)), 100.0)
    assert [broken.counts((1,), 100.0 + after) for after in (0.0, AGAIN - 1, AGAIN)] == [True, True, False]
    assert (works.counts((1,), 1e9), works.counts((2,), 100.0)) == (True, False)


async def test_a_disk_without_room_for_the_trial_is_told_and_costs_the_agent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    installed = Installed([LlamaCpp()], state=tmp_path)
    await installed.look()
    (install,) = installed.installs
    assert install.state is InstallState.FAILED
    assert f"({tmp_path}/gone/" in install.detail


async def test_a_command_that_leads_in_a_circle_is_named(tmp_path: Path) -> None:
    circle = tmp_path / "llama-server"
    circle.symlink_to(circle)
    installed = Installed([LlamaCpp()], commands={"llamacpp": [str(circle)]}, state=tmp_path)
    with pytest.raises(NotFound, match=str(circle)):
        await installed.found("llamacpp")


@pytest.mark.parametrize("command", ["/no/such/llama-server", "/etc/passwd", "/tmp"])
async def test_a_command_that_is_no_program_is_named(tmp_path: Path, command: str) -> None:
    installed = Installed([LlamaCpp()], commands={"llamacpp": [command]}, state=tmp_path)
    with pytest.raises(NotFound, match=command):
        await installed.found("llamacpp")


async def test_what_is_not_here_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    installed = Installed([Vllm()], state=tmp_path)
    await installed.look()
    assert installed.installs == ()
    with pytest.raises(NotFound, match="install it"):
        await installed.found("vllm")


def test_the_version_of_a_python_engine_is_read_beside_its_script_without_starting_it(tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "vllm", "raise SystemExit(1)")
    (tmp_path / "lib/python3.12/site-packages/vllm-0.32.0+cpu.dist-info").mkdir(parents=True)
    place = whereabouts("vllm", {"vllm": [path]})
    assert place is not None
    assert (place.command, place.version) == ((path,), "0.32.0+cpu")


async def test_a_tried_program_leaves_no_process(tmp_path: Path) -> None:
    installed = Installed([LlamaCpp()], state=tmp_path / "marked")
    await installed.found("llamacpp")
    await until(lambda: not marked(tmp_path / "marked"))


async def test_what_the_settings_add_to_an_engines_environment_reaches_it(tmp_path: Path) -> None:
    path = program(tmp_path / "bin", "vllm", "raise SystemExit(1)")
    installed = Installed([Vllm()], commands={"vllm": [path]}, environments={"vllm": {"A": "b"}}, state=tmp_path)
    assert (await installed.found("vllm")).env == {"A": "b"}
