"""The other end of `aside`: one function, its arguments from standard input, its answer to standard output."""

from __future__ import annotations

import importlib
import os
import sys

import msgspec


def main() -> None:
    module, name, nice = sys.argv[1:4]
    if not module.startswith("llmgw."):
        raise SystemExit(f"{module} is not a part of llmgw")
    os.nice(int(nice))
    args = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[bytes])
    answer: bytes = getattr(importlib.import_module(module), name)(*args)
    # Not by sys.stdout: with PYTHONUNBUFFERED in the environment that leaves it at a write that was cut short.
    with open(1, "wb", closefd=False) as stdout:
        stdout.write(answer)
    # Taking a large graph of objects apart one by one takes longer than leaving.
    os._exit(0)


if __name__ == "__main__":
    main()
