"""Runs commands in a guest for the tests outside: one connection, one command, both ended with each other.

A line of JSON says what to run; a line of JSON says how it ended. When the other side closes first, the command's
whole process group is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading

PORT = 5555


def serve(peer: socket.socket) -> None:
    with peer, peer.makefile("rb") as lines:
        asked = json.loads(lines.readline())
        process = subprocess.Popen(
            asked["command"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            env={**os.environ, **asked.get("env", {})},
        )
        watch = threading.Thread(target=end_with, args=(peer, process), daemon=True)
        watch.start()
        out, err = process.communicate()
        answer = {
            "exit_code": process.returncode,
            "stdout": out.decode("utf-8", "replace"),
            "stderr": err.decode("utf-8", "replace"),
        }
        with contextlib.suppress(OSError):
            peer.sendall(json.dumps(answer).encode() + b"\n")


def end_with(peer: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Kill the command when its connection ends. The client sends nothing more, so readable means closed."""
    while process.poll() is None:
        readable, _, _ = select.select([peer], [], [], 0.2)
        # One that has ended may have left others behind on purpose.
        if readable and process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            return


listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("0.0.0.0", PORT))
listener.listen(64)
print("guest: ready", flush=True)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
