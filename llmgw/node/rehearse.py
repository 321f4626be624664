"""The short run before the real one: whether what the engine needs of others is there (`engines.Rehearsal`)."""

from __future__ import annotations

import os
from subprocess import DEVNULL, PIPE, STDOUT

import trio

from llmgw.node.engines.environment import PROBE, SHARD, TOKEN, engine_environment
from llmgw.node.lines import clean
from llmgw.node.prepare import Failure, Means, Prepared
from llmgw.wire.control import StartShard

_MOST_OUTPUT = 256 << 10
_LAST_LINES = 20


async def rehearse(order: StartShard, prepared: Prepared, means: Means) -> Failure | None:
    """Run the command's rehearsal, if it has one; why the start makes no sense. Cancelled, nothing of it is left."""
    rehearsal = prepared.command.rehearsal
    if rehearsal is None:
        return None
    env = engine_environment(
        os.environ,
        prepared.command.env,
        order.spec,
        shard=order.shard,
        generation=order.generation,
        token="-",
        state=str(means.state),
    )
    # It is no engine: a later agent ends it instead of adopting it.
    env = {name: value for name, value in env.items() if name not in (SHARD, TOKEN)} | {PROBE: "1"}
    try:
        process = await trio.lowlevel.open_process(
            list(rehearsal.argv), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=env, cwd="/"
        )
    except OSError as error:
        means.ports.release(order.shard)
        return Failure("cannot-start", f"{rehearsal.argv[0]} cannot be executed: {error.strerror}", "check it")
    output = bytearray()
    assert process.stdout is not None
    try:
        with trio.move_on_after(rehearsal.within):
            async for data in process.stdout:
                output += data[: _MOST_OUTPUT - len(output)]
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 5.0):
            await process.wait()
            await process.stdout.aclose()
    lines = clean(bytes(output))
    objection = rehearsal.objection(lines)
    if objection is None:
        return None
    means.ports.release(order.shard)
    return Failure(objection.code, objection.text, objection.remedy, lines=tuple(lines[-_LAST_LINES:]))
