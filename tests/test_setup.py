"""What the scripts do before the first test on a machine that may be new: its network has hiccups, others use apt."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import attrs
import pytest

ENV = Path(__file__).parents[1] / "scripts" / "env.sh"

LOCKED = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (unattended-upgr)"
CUT = "E: Failed to fetch http://deb.example/pool/thing.deb  Connection failed"
INTERRUPTED = "E: dpkg was interrupted, you must manually run 'dpkg --configure -a' to correct the problem."

#: Does as the next line of a file of its own name says ("" is success, else these are its last words), and notes it.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> "{calls}"
answer=$(sed -n 1p "{answers}/$(basename "$0")" 2>/dev/null) && sed -i 1d "{answers}/$(basename "$0")" 2>/dev/null
[ -z "$answer" ] || {{ echo "$answer" >&2; exit 100; }}
"""

#: A Python that makes environments of itself.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "venv" >> "{calls}" ;;
    "-m pip install"*) exec "{tools}/pip" "$@" ;;
esac
"""


@attrs.frozen
class Machine:
    """A new machine on paper: its tools say what the test wants, and a pause takes no time."""

    root: Path

    @property
    def calls(self) -> list[str]:
        """What was run, in order: programs with their first words that are no options."""
        lines = (self.root / "calls").read_text().splitlines() if (self.root / "calls").exists() else []
        return [" ".join(word for word in line.split() if word[0] != "-" and "::" not in word) for line in lines]

    def answers(self, program: str, *words: str) -> None:
        (self.root / "answers" / program).write_text("".join(f"{word}\n" for word in words))

    def run(self, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.root / 'tools'}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", f'set -euo pipefail\nsource "{self.root}/scripts/env.sh"\n{script}'],
            env={"PATH": path, "HOME": str(self.root), **env}, capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for folder in ("tools", "answers", "scripts"):
        (tmp_path / folder).mkdir()
    shutil.copy(ENV, tmp_path / "scripts")
    for file in ("pyproject.toml", "scripts/constraints.txt"):
        (tmp_path / file).write_text("")
    places = {name: tmp_path / name for name in ("calls", "answers", "tools")}
    for tool in ("apt-get", "dpkg", "pip", "sleep"):
        (tmp_path / "tools" / tool).write_text(FAKE.format(**places))
    (tmp_path / "tools" / "dpkg-query").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "tools" / "id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "tools" / "python3").write_text(PYTHON.format(**places))
    for made in (tmp_path / "tools").iterdir():
        made.chmod(0o755)
    return Machine(tmp_path)


def test_who_holds_a_lock_that_apt_does_not_wait_for_is_waited_for(machine: Machine) -> None:
    machine.answers("apt-get", *[LOCKED] * 5, "", *[LOCKED] * 4)
    done = machine.run("need_debian thing")
    assert done.returncode == 0, done.stderr
    update, install = ["apt-get update", "sleep 20"], ["apt-get install thing", "sleep 20"]
    assert machine.calls == [*update * 5, update[0], *install * 4, install[0]]
    assert "waits: E: Could not get lock /var/lib/apt/lists/lock" in done.stderr


def test_a_download_that_is_cut_is_tried_again(machine: Machine) -> None:
    machine.answers("apt-get", CUT, "", CUT, CUT, "")
    assert machine.run("need_debian thing").returncode == 0
    assert machine.calls.count("apt-get update") == 2
    assert machine.calls.count("apt-get install thing") == 3


def test_lists_that_cannot_be_had_are_done_without(machine: Machine) -> None:
    machine.answers("apt-get", CUT, CUT, CUT, "")
    assert machine.run("need_debian thing").returncode == 0
    assert machine.calls[-1] == "apt-get install thing"


def test_what_fails_every_time_is_said_in_apts_words(machine: Machine) -> None:
    machine.answers("apt-get", "", CUT, CUT, CUT)
    done = machine.run('need_debian thing || echo "without"')
    assert done.stdout == "without\n"
    assert CUT in done.stderr


def test_an_installation_that_was_cut_short_is_ended_first(machine: Machine) -> None:
    machine.answers("apt-get", "", INTERRUPTED, "")
    assert machine.run("need_debian thing").returncode == 0
    assert machine.calls == ["apt-get update", "apt-get install thing", "dpkg", "sleep 20", "apt-get install thing"]


def test_a_virtual_environment_is_made_once_and_pip_may_fail_twice(machine: Machine) -> None:
    machine.answers("pip", "", CUT, CUT, "")
    assert machine.run("ensure_venv dev").returncode == 0
    assert [call.split()[0] for call in machine.calls] == ["venv", "pip", "pip", "sleep", "pip", "sleep", "pip"]
    assert machine.run("ensure_venv dev").returncode == 0
    assert machine.calls.count("venv") == 1


def test_an_environment_that_cannot_be_made_ends_it(machine: Machine) -> None:
    (machine.root / "tools" / "python3").write_text('#!/bin/sh\n[ "$2" != venv ]\n')
    done = machine.run("ensure_venv dev\necho went on")
    assert (done.returncode, done.stdout) == (1, "")


def test_two_at_once_make_one_environment(machine: Machine) -> None:
    done = machine.run("ensure_venv dev & one=$!\nensure_venv dev & two=$!\nwait $one\nwait $two")
    assert done.returncode == 0, done.stderr
    assert machine.calls.count("venv") == 1
    assert len(machine.calls) == 3, "pip, for itself and for the rest"


def test_pip_that_fails_every_time_ends_it_with_its_words_and_the_next_run_begins_anew(machine: Machine) -> None:
    machine.answers("pip", "", CUT, CUT, CUT, "", "")
    done = machine.run("ensure_venv dev\necho went on")
    assert (done.returncode, done.stdout) == (1, "")
    assert CUT in done.stderr
    (machine.root / ".venv" / "half").write_text("")
    assert machine.run("ensure_venv dev").returncode == 0
    assert machine.calls.count("venv") == 2
    assert not (machine.root / ".venv" / "half").exists()


def test_someones_own_environment_keeps_what_it_has(machine: Machine) -> None:
    own = machine.root / "own" / "bin"
    own.mkdir(parents=True)
    (own / "mine").write_text("")
    machine.answers("pip", "", CUT, CUT, CUT, "", "")
    for expected in (1, 0):
        assert machine.run("ensure_venv dev", LLMGW_VENV=str(own.parent)).returncode == expected
    assert (own / "mine").exists()


def test_other_requirements_are_installed_into_the_same_environment(machine: Machine) -> None:
    assert machine.run("ensure_venv dev\nensure_venv engine dev").returncode == 0
    (machine.root / "pyproject.toml").write_text("other")
    assert machine.run("ensure_venv dev").returncode == 0
    (machine.root / "pyproject.toml").write_text("")
    before = len(machine.calls)
    assert machine.run("ensure_venv dev").returncode == 0
    assert len(machine.calls) > before, "what the first run left is not what this one needs"
    assert machine.calls.count("venv") == 1
