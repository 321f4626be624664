"""A program in ib_write_bw's place that moves no RDMA: it exchanges over TCP as perftest does and prints its table.

For tests of everything around perftest on machines without an adapter; the real program over real verbs runs in
tests/rigs/roce. What it measures is read from the file `gbps` beside it, by device; a client that has reached its
server leaves a file `connected` there.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

_PROGRAM = """#!{python} -S
import os, select, socket, sys
args = sys.argv[1:]
if "--version" in args: print("Version: 6.06"); sys.exit(1)
if "--help" in args: print("  -D, --duration\\n      --report_gbits"); sys.exit(1)
def option(name): return args[args.index(name) + 1]
port, seconds, size, device = int(option("-p")), float(option("-D")), int(option("-s")), option("-d")
here = os.path.dirname(os.path.abspath(__file__))
def rates():
    return dict(line.split() for line in open(os.path.join(here, "gbps")))
def table():
    print("                    RDMA_Write BW Test")
    print(" #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]")
    print(" %d      1000           0.00              %s               0.100" % (size, rates().get(device, "97.0")))
def left():
    sys.stderr.write("ethernet_read_keys: Couldn't read remote address\\n Unable to read to socket/rdma_cm\\n")
    sys.exit(1)
if args[-2].startswith("-") and args[-2] not in ("--report_gbits", "-b", "-F") or args[-1].startswith("-"):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try: s.bind(("", port)); s.listen()
    except OSError: sys.stderr.write("Couldn't listen to port %d\\n" % port); sys.exit(1)
    print("* Waiting for client to connect... *", flush=True)
    peer, _ = s.accept()
    if peer.recv(4) != b"done": left()
    peer.sendall(b"done"); table()
else:
    try: peer = socket.create_connection((args[-1], port), 10)
    except OSError: sys.stderr.write("Couldn't connect to %s:%d\\n" % (args[-1], port)); sys.exit(1)
    open(os.path.join(here, "connected"), "w").close()
    select.select([peer], [], [], seconds)  # or until the server is gone
    try:
        peer.sendall(b"done")
        if peer.recv(4) != b"done": raise OSError
    except OSError: table(); sys.stdout.flush(); left()
    table()
"""


def install(directory: Path, **gbps: float) -> Path:
    """Write the program and what it measures; the folder to put first in PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "ib_write_bw"
    program.write_text(_PROGRAM.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (directory / "gbps").write_text("".join(f"{device} {rate}\n" for device, rate in gbps.items()))
    return directory
