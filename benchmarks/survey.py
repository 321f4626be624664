"""What watching a node costs: CPU per heartbeat's survey and the agent's memory, with 8 GPUs and 8 + 1 ports.

    python -m benchmarks.survey [--seconds 20] [--every 0.5]

The whole agent is loaded, and its survey runs against a made-up sysfs (9 ports of 40 counters) and a driver library
that answers at once, so what is measured is ours: reading, understanding, judging, telling, encoding. Beside it, in
the same run, the same files read in the plainest way. Printed as a share of one core at a heartbeat each 5 seconds;
the NVML process is counted by itself. Aims: below 0.5 % of a core and 60 MB.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from llmgw.node.spare import NEEDLESS, without

with without(*NEEDLESS):
    import httpcore  # noqa: F401
    import trio

    import llmgw.node.main  # noqa: F401  # the whole agent, as it is loaded on a node

from llmgw.node.survey import Survey
from llmgw.node.view import View
from llmgw.wire.codec import encode
from tests.fakes.nvml import Driver
from tests.fakes.sysfs import hgx

PERIOD = 5.0


def resident(pid: int | str = "self") -> float:
    """Megabytes."""
    words = Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()
    return int(words[0]) * 1024 / 1e6


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / 100


def plainly(root: Path) -> int:
    """Every counter and state by the standard library's means, nothing understood."""
    ports = root / "sys/class/infiniband"
    files = [
        *ports.glob("*/ports/*/counters/*"),
        *ports.glob("*/ports/*/hw_counters/*"),
        *ports.glob("*/ports/*/state"),
    ]
    return sum(len(file.read_text()) for file in files)


async def measure(root: Path, seconds: float, every: float) -> None:
    hgx(root)
    driver = Driver(root, "gpus 8", *(f"process {n} {1000 + n} 1048576" for n in range(8)))
    survey = Survey(View(root=root, state=root, period=every), dict, probe=driver.probe())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(survey.run)
        await survey.gpus.asked.wait()
        await survey.ports.asked.wait()
        register = await survey.register()
        beats = survey.beats(register)
        await beats.next()
        child = survey.gpus.probe.pid or 0
        sizes, count = [], 0
        began, used, child_used = time.monotonic(), time.process_time(), cpu_of(child)
        while time.monotonic() - began < seconds:
            await trio.sleep(every)
            sizes.append(len(encode(await beats.next())))
            count += 1
        used, child_used = time.process_time() - used, cpu_of(child) - child_used
        memory, child_memory = resident(), resident(child)
        nursery.cancel_scope.cancel()
    began_plainly = time.process_time()
    for _ in range(20):
        plainly(root)
    plain = (time.process_time() - began_plainly) / 20
    mine, theirs = used / count, child_used / count
    print(f"register: {len(encode(register))} bytes; heartbeat: {sum(sizes) // len(sizes)} bytes on average of {count}")
    print(f"agent:         {mine * 1e3:6.2f} ms a survey = {100 * mine / PERIOD:.3f} % of a core; {memory:.1f} MB")
    print(
        f"its NVML child: {theirs * 1e3:5.2f} ms a survey = {100 * theirs / PERIOD:.3f} % of a core; "
        f"{child_memory:.1f} MB"
    )
    print(
        f"plain reading: {plain * 1e3:6.2f} ms for the same files alone; the whole survey is {mine / plain:.2f} of it"
    )
    print(f"aims: agent {'met' if 100 * mine / PERIOD < 0.5 else 'MISSED'} (0.5 %), "
          f"memory {'met' if memory < 60 else 'MISSED'} (60 MB)")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--every", type=float, default=0.5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llmgw-survey-") as folder:
        trio.run(measure, Path(folder), options.seconds, options.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
