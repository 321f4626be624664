"""Crash matrix: whatever dies, whenever it dies, are there ever two of a shard, or none, or one that nobody knows of?

    python -m benchmarks.crash [--schedules 2000] [--first 0] [--kills 30] [--full] [--jobs 2] [--seed N]
                               [--only simulation|real]

In simulation the shipped plane and agents run on kernels, networks and a store in memory, under a clock that jumps:
thousands of schedules of kills at every step, partitions, stalls, repeated frames, failing stores, operators, with
replicas of one node and of two or three ("gangs": how often one of these came to serve). Over real processes a plane,
its agents, llama-server and rpc-server are killed at random moments. `--full` is 10,000 schedules and 300 kills.

Each schedule follows from its seed. One that finds something is cut down to the faults that matter, and printed;
`--seed N` runs it again and prints its course.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time

import attrs

from benchmarks.crash.schedule import drawn, shrunk
from benchmarks.crash.simulation import Outcome, heeds_the_clock, simulate

#: Of the schedules in which the machine's clock jumps, one in so many is run again without the jumps.
AGAIN = 5
#: Schedules that one worker gets at a time.
BATCH = 50


@attrs.define
class Totals:
    """The table's row."""

    schedules: int = 0
    faults: int = 0
    events: int = 0
    gangs: int = 0
    duplicates: int = 0
    lost: int = 0
    orphans: int = 0
    others: int = 0
    worst: float = 0.0
    worst_seed: int = 0
    jumps: int = 0
    failed: list[int] = attrs.field(factory=list)

    def add(self, outcome: Outcome, faults: int) -> None:
        self.schedules += 1
        self.faults += faults
        self.events += outcome.events
        self.gangs += outcome.gangs
        self.duplicates += len(outcome.duplicates)
        self.lost += len(outcome.lost)
        self.orphans += len(outcome.orphans)
        self.others += len(outcome.wrongs)
        if outcome.rest > self.worst:
            self.worst, self.worst_seed = outcome.rest, outcome.seed
        if not outcome.fine:
            self.failed.append(outcome.seed)

    def join(self, other: Totals) -> None:
        for name in ("schedules", "faults", "events", "gangs", "duplicates", "lost", "orphans", "others", "jumps"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.worst > self.worst:
            self.worst, self.worst_seed = other.worst, other.worst_seed
        self.failed += other.failed


def some(first: int, count: int) -> Totals:
    """Run schedules, one after the other."""
    totals = Totals()
    for seed in range(first, first + count):
        schedule = drawn(seed)
        outcome = simulate(schedule)
        if any(fault.kind == "wall clock jumps" for fault in schedule.faults) and seed % AGAIN == 0:
            totals.jumps += 1
            if heeds_the_clock(schedule):
                outcome.wrongs.append("a jump of the machine's clock changed what was decided")
        totals.add(outcome, len(schedule.faults))
    return totals


def in_processes(first: int, count: int, jobs: int) -> Totals:
    """The same in processes of their own, a few at a time."""
    totals, running = Totals(), list[subprocess.Popen[str]]()
    starts = list(range(first, first + count, BATCH))
    began, said = time.monotonic(), time.monotonic()
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        while starts or running:
            while starts and len(running) < jobs:
                at = starts.pop(0)
                words = ["--batch", str(at), str(min(BATCH, first + count - at))]
                command = [sys.executable, "-m", "benchmarks.crash", *words]
                running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env))
            process = running.pop(0)
            output, _ = process.communicate()
            if process.returncode:
                raise SystemExit(f"a worker ended with {process.returncode}")
            totals.join(Totals(**json.loads(output)))
            if time.monotonic() - said > 60:
                said = time.monotonic()
                print(f"  {totals.schedules} schedules, {said - began:.0f} s, found: {len(totals.failed)}", flush=True)
    finally:
        for process in running:
            process.kill()
            process.wait()
    return totals


def show(totals: Totals, seconds: float) -> None:
    print("  schedules   faults    events    gangs  duplicates  lost  orphans  other wrongs  longest to rest")
    print(
        f"  {totals.schedules:9,} {totals.faults:8,} {totals.events:9,} {totals.gangs:8,}  {totals.duplicates:10}  "
        f"{totals.lost:4}  {totals.orphans:7}  {totals.others:12}  {totals.worst:7.1f} s (seed {totals.worst_seed})"
    )
    print(
        f"  {seconds:.0f} s; {totals.jumps} schedules were run again without the jumps of the machine's clock, "
        "and took the same course"
    )


def explain(seed: int) -> None:
    """Run one schedule again, cut it down, and print what is left of it."""
    schedule = drawn(seed)
    outcome = simulate(schedule)
    print(outcome)
    if not outcome.fine:
        schedule = shrunk(schedule, lambda part: not simulate(part).fine)
        outcome = simulate(schedule)
        print("  cut down to:")
    print(f"{schedule}\n  its course:")
    print("\n".join(f"    {line[:160]}" for line in outcome.commands))
    print(outcome)


def simulated(first: int, count: int, jobs: int) -> int:
    print(f"in simulation, {count:,} schedules:", flush=True)
    began = time.monotonic()
    totals = in_processes(first, count, jobs)
    show(totals, time.monotonic() - began)
    for seed in totals.failed[:5]:
        # In a process with the hash seed of the workers, or it would take another course.
        subprocess.run([sys.executable, "-m", "benchmarks.crash", "--seed", str(seed)], check=False)
    return len(totals.failed)


def main() -> int:
    words = argparse.ArgumentParser(prog="benchmarks.crash", description=(__doc__ or "").splitlines()[0])
    words.add_argument("--schedules", type=int)
    words.add_argument("--first", type=int, default=0, help="the seed of the first schedule [0]")
    words.add_argument("--kills", type=int)
    words.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    words.add_argument("--full", action="store_true", help="10,000 schedules and 300 kills of real processes")
    words.add_argument("--seed", type=int, help="run this one schedule and print its course")
    words.add_argument("--only", choices=("simulation", "real"))
    words.add_argument("--batch", type=int, nargs=2, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.batch:
        print(json.dumps(attrs.asdict(some(*given.batch))))
        return 0
    if given.seed is not None:
        if os.environ.get("PYTHONHASHSEED") != "0":
            os.execve(
                sys.executable,
                [sys.executable, "-m", "benchmarks.crash", "--seed", str(given.seed)],
                {**os.environ, "PYTHONHASHSEED": "0"},
            )
        explain(given.seed)
        return 0
    found = 0
    if given.only != "real":
        found += simulated(given.first, given.schedules or (10_000 if given.full else 2_000), given.jobs)
    if given.only != "simulation":
        from benchmarks.crash.real import killed

        found += killed(given.kills or (300 if given.full else 30))
    return bool(found)
