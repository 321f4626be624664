"""Starting an engine so that it can never run without its record.

The new process first waits at a gate (a pipe on its standard input) before it becomes the engine. Its id and start
time are written to the disk while it waits; only then the gate opens. An agent that dies in between closes the pipe
by dying, and the process leaves without having become anything. So there is no moment in which an engine runs and
no record names it.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llmgw.node import processes
from llmgw.node.processes import Seen

#: What the waiting process exits with when nobody opened the gate.
NEVER_STARTED = 75

# SIGHUP would end an engine whose agent's terminal closes. A core of an engine is as large as its memory. An agent
# that is spared when memory runs out must not pass that on. exec keeps the process id, so what the record says stays
# true.
_GATE = (
    'trap "" HUP; ulimit -c 0 2>/dev/null; { echo 0 >/proc/self/oom_score_adj; } 2>/dev/null; '
    'read -r go || exit 75; exec "$@" </dev/null'
)


def launch(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    log: Path,
    record: Callable[[Seen], None],
    scope: Sequence[str] = (),
) -> Seen:
    """Start a process in a session of its own, its output appended to `log`; its identity, already recorded.

    `record` is called while the process waits and must have made its note durable when it returns. Blocks for some
    milliseconds: call it in a thread. `scope` is a command that puts the process into a cgroup of its own and executes
    the rest. Raises OSError, of this or of `record`; then nothing runs.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        process = subprocess.Popen(
            [*scope, "/bin/sh", "-c", _GATE, "llmgw-gate", *argv],
            stdin=subprocess.PIPE,
            stdout=descriptor,
            stderr=descriptor,
            env=dict(env),
            cwd=cwd if os.path.isdir(cwd) else "/",
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    assert process.stdin is not None
    try:
        if (seen := processes.look(process.pid)) is None:  # /proc is not mounted, or hides even our own children
            raise ProcessLookupError(errno.ESRCH, "the new process cannot be seen in /proc", f"/proc/{process.pid}")
        record(seen)
        process.stdin.write(b"go\n")
        process.stdin.close()
    except BrokenPipeError:
        assert seen is not None  # it is gone already, and whoever watches it will say how
    except BaseException:
        process.kill()
        process.communicate()
        raise
    # We wait by pidfd, and this object must neither wait nor complain: the process outlives it and perhaps us.
    process.returncode = 0
    return seen


def scope_command(unit: str, user: bool) -> tuple[str, ...]:
    """The words that make systemd give the process a cgroup of its own, outside the agent's.

    Whatever KillMode the agent's unit has, a stop of the agent then ends everything of the agent and no engine.
    """
    options = ("--user",) if user else ()
    return ("systemd-run", *options, "--scope", "--quiet", "--collect", f"--unit={unit}", "--")


def confined(service: str, user: bool, env: Mapping[str, str] | None = None) -> bool:
    """Whether the agent is this service, of a user's systemd or the system's, and a stop of it would end whatever it
    started. Where that is not to be learned it would, as by default. Runs systemctl once: call it in a thread."""
    environ = os.environ if env is None else env
    if "INVOCATION_ID" not in environ or not service:
        return False
    words = ["systemctl", *(("--user",) if user else ()), "show", "--property=KillMode", "--value", service]
    try:
        said = subprocess.run(words, env=dict(environ), capture_output=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return True
    return said.strip() not in (b"process", b"none")


def scopes_work(env: Mapping[str, str] | None = None) -> bool:
    """Whether the agent runs as a systemd unit that may make scopes. Runs systemd-run once: call it in a thread."""
    environ = os.environ if env is None else env
    if "INVOCATION_ID" not in environ or shutil.which("systemd-run", path=environ.get("PATH")) is None:
        return False
    words = scope_command(f"llmgw-engine-check-{os.getpid()}.scope", user=os.geteuid() != 0)
    try:
        return subprocess.run([*words, "true"], env=dict(environ), capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
