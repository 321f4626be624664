"""The programs from outside: what is printed, where, and with which status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from llmgw import __version__
from llmgw.cli import call, unwrapped
from llmgw.errors import Conflict, LlmgwError, NotFound
from llmgw.plane.gateway.keys import Key, hash_of
from llmgw.plane.settings import load

pytestmark = pytest.mark.real


def program(name: str, *args: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    code = f"import sys; from llmgw.cli import {name}; sys.exit({name}())"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        capture_output=True, text=True, check=False, timeout=60, env=env, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llmgw", "plane", "node"])
def test_every_program_tells_its_version(name: str) -> None:
    done = program(name, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert __version__ in done.stdout


def test_a_plane_is_made_and_checked(tmp_path: Path) -> None:
    made = program("plane", "init", "--dir", tmp_path / "p", "--host", "gw.example")
    assert (made.returncode, made.stderr) == (0, "")
    assert "gw.example" in made.stdout
    assert (tmp_path / "p" / "admin.token").read_text().strip() not in made.stdout
    checked = program("plane", "check", "--dir", tmp_path / "p")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "server.pem: good for" in checked.stdout


def test_what_goes_wrong_is_one_line_on_stderr_and_a_status(tmp_path: Path) -> None:
    program("plane", "init", "--dir", tmp_path)
    again = program("plane", "init", "--dir", tmp_path)
    assert again.returncode == Conflict.exit_status
    assert again.stdout == ""
    assert again.stderr.startswith(f"llmgw-plane: {tmp_path} holds a plane already")
    assert again.stderr.count("\n") == 1


def test_wrong_settings_are_named_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "plane.toml").write_text("\nagents_listn = 1\n")
    for command in ("check", "run", "gateway"):
        done = program("plane", command, "--dir", tmp_path)
        assert done.returncode == 2
        assert done.stderr == (
            f"llmgw-plane: {tmp_path}/plane.toml, line 2: unknown key 'agents_listn': did you mean 'agents_listen'?\n"
        )


def test_a_node_that_has_not_joined_says_how_to(tmp_path: Path) -> None:
    done = program("node", "check", "--dir", tmp_path)
    assert done.returncode == NotFound.exit_status
    assert "`llmgw-node join URL --token TOKEN`" in done.stderr


def test_a_token_file_that_is_missing_is_named(tmp_path: Path) -> None:
    done = program("node", "join", "wss://127.0.0.1:1", "--token", f"@{tmp_path}/none", "--dir", tmp_path / "n")
    assert done.returncode == NotFound.exit_status
    assert "none is missing (the token)" in done.stderr


def test_a_join_to_nobody_is_one_line(tmp_path: Path) -> None:
    token = f"llmgw1.abc.{'s' * 43}.{'f' * 43}"
    done = program("node", "join", "wss://127.0.0.1:1", "--token", token, "--name", "n1", "--dir", tmp_path / "n")
    assert done.returncode == 6
    assert done.stderr.startswith("llmgw-node: cannot reach wss://127.0.0.1:1: ")
    assert "s" * 43 not in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`llmgw-plane --help | head -1`"""
    code = (
        "import sys, click; from llmgw.cli import call\n"
        "@click.command()\n"
        "def endless():\n"
        "    while True: click.echo('line ' * 100)\n"
        "sys.exit(call(endless, 'endless'))\n"
    )
    shell = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -c \"$CODE\" | head -1"],
        capture_output=True, text=True, check=False, timeout=60, env={"CODE": code, "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert (shell.returncode, shell.stderr) == (1, "")
    assert shell.stdout.count("\n") == 1


def test_ctrl_c_ends_quietly_with_130() -> None:
    code = (
        "import sys, click, trio; from llmgw.cli import call\n"
        "@click.command()\n"
        "def wait(): trio.run(ready)\n"
        "async def ready():\n"
        "    print('ready', flush=True)\n"
        "    await trio.sleep_forever()\n"
        "sys.exit(call(wait, 'wait'))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read().strip() == ""


def test_an_unknown_command_is_the_users_error() -> None:
    done = program("plane", "rnu")
    assert done.returncode == 2
    assert "No such command 'rnu'" in done.stderr


def _raising(error: BaseException) -> click.Command:
    def body() -> None:
        raise error

    return click.Command("x", callback=body)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("llmgw", ["ctl", "label", "gpu-01"]),
        ("llmgw", ["ctl", "why"]),
        ("llmgw", ["ctl", "apply", "-f"]),
        ("plane", ["init", "--host"]),
        ("node", ["join"]),
    ],
)
def test_an_argument_that_is_no_text_is_refused_whoever_gets_it(name: str, args: list[str]) -> None:
    done = program(name, *args, os.fsdecode(b"rack=\xff"))
    assert done.returncode == 2
    assert done.stderr.endswith(": the argument b'rack=\\xff' is not UTF-8 text\n")


def shell(script: str) -> subprocess.CompletedProcess[str]:
    code = f"{sys.executable} -W error -c 'import sys; from llmgw.cli import llmgw; sys.exit(llmgw())'"
    return subprocess.run(
        ["sh", "-c", script.replace("LLMGW", code)], capture_output=True, text=True, check=False, timeout=60
    )


def test_a_full_disk_behind_the_output_is_said_in_a_line() -> None:
    done = shell("LLMGW ctl completion bash > /dev/full")
    assert (done.returncode, done.stderr) == (1, "llmgw: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_output_that_is_closed_takes_everything(closed: str) -> None:
    done = shell(f"LLMGW ctl completion bash {closed}")
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_in_groups_of_one_come_out_bare(capsys: pytest.CaptureFixture[str]) -> None:
    error = NotFound("no node gpu-9", remedy="see `llmgw ctl nodes`")
    assert call(_raising(BaseExceptionGroup("a", [ExceptionGroup("b", [error])])), "x", []) == NotFound.exit_status
    assert capsys.readouterr().err == "x: no node gpu-9: see `llmgw ctl nodes`\n"


def test_ctrl_c_counts_before_what_it_brought_about() -> None:
    group = BaseExceptionGroup("a", [KeyboardInterrupt(), LlmgwError("x")])
    assert call(_raising(group), "x", []) == 130


def test_a_reader_that_goes_away_is_no_error_inside_a_group_either() -> None:
    code = (
        "import sys, click; from llmgw.cli import call\n"
        "@click.command()\n"
        "def piped(): raise ExceptionGroup('a', [BrokenPipeError(32, 'Broken pipe')])\n"
        "sys.exit(call(piped, 'piped'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_defect_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        call(_raising(ZeroDivisionError()), "x", [])
    with pytest.raises(ExceptionGroup):
        call(_raising(ExceptionGroup("a", [ZeroDivisionError(), LlmgwError("x")])), "x", [])
    assert isinstance(unwrapped(ExceptionGroup("a", [LlmgwError("x"), LlmgwError("y")])), LlmgwError)


def test_help_does_not_wait_for_what_only_running_needs() -> None:
    code = "import sys; from llmgw.cli import plane; plane(['--help']); sys.exit('trio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert done.returncode == 0


def test_an_api_key_is_made_alone_on_stdout_and_its_hash_is_ready_for_plane_toml(tmp_path: Path) -> None:
    made = program("plane", "key", 'team "a"', "--model", "org/tiny", "--model", "größe")
    assert made.returncode == 0
    (secret,) = made.stdout.split()
    assert secret not in made.stderr
    program("plane", "init", "--dir", tmp_path)
    file = tmp_path / "plane.toml"
    file.write_text(file.read_text() + made.stderr.partition(":\n")[2])
    (key,) = load(file).gateway.keys
    assert key == Key('team "a"', hash_of(secret), ("org/tiny", "größe"))


def test_a_machine_is_examined_without_a_plane(tmp_path: Path) -> None:
    done = program("node", "doctor", "--dir", tmp_path, "--only", "agent.ports", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"check": "agent.ports"' in done.stdout
    assert "agent.identity" in program("node", "doctor", "--list").stdout
