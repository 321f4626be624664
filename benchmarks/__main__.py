"""Every benchmark, one after the other: `python -m benchmarks [NAME ...]`, or `scripts/bench`.

Each answers one question, compares side by side in its own run, and prints ratios: on a busy machine trust these and
not the figures.
"""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module

import benchmarks


def names() -> list[str]:
    """The modules here that are benchmarks: those with a `main`."""
    found = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    return [name for name in found if hasattr(import_module(f"benchmarks.{name}"), "main")]


def main() -> int:
    wanted = sys.argv[1:] or names()
    if unknown := [name for name in wanted if name not in names()]:
        print(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted:
        question = (import_module(f"benchmarks.{name}").__doc__ or name).strip().splitlines()[0]
        print(f"\n== {name}: {question}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        print(f"\nfailed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
