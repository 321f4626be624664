"""The short run before the real one: whether what the engine needs of others is there (`engines.Rehearsal`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from subprocess import DEVNULL, PIPE, STDOUT

import trio

from llmgw.node.engines.environment import PROBE, SHARD, TOKEN, engine_environment
from llmgw.node.lines import clean
from llmgw.node.prepare import LAST_LINES, Failure, Means, Prepared
from llmgw.node.run import REAP_WITHIN
from llmgw.wire.control import StartShard

_MOST_OUTPUT = 256 << 10


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
    objection, lines = None, []
    sensible = False
    try:
        output = await _output(rehearsal.argv, env, rehearsal.within)
        lines = clean(output)
        objection = rehearsal.objection(lines)
        sensible = objection is None
    except OSError as error:
        return Failure("cannot-start", f"{rehearsal.argv[0]} cannot be executed: {error.strerror}", "check it")
    finally:
        if not sensible:
            means.ports.release(order.shard)
    if objection is None:
        return None
    return Failure(objection.code, objection.text, objection.remedy, lines=tuple(lines[-LAST_LINES:]))


async def _output(argv: Sequence[str], env: Mapping[str, str], within: float) -> bytes:
    """What a command prints within so many seconds; it is killed then. Raises OSError."""
    process = await trio.lowlevel.open_process(
        list(argv), stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=dict(env), cwd="/"
    )
    assert process.stdout is not None
    output = bytearray()
    try:
        with trio.move_on_after(within):
            async for data in process.stdout:
                output += data[: _MOST_OUTPUT - len(output)]
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + REAP_WITHIN):
            await process.wait()
            await process.stdout.aclose()
    return bytes(output)
