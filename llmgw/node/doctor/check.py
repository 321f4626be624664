"""What a check is: a stable id and a function of the patient that gives findings.

A check that throws or takes too long is its own finding and nobody else's. Synchronous checks run in threads, since
files of sick hardware may block; asynchronous ones run under a deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from inspect import iscoroutinefunction
from typing import cast

import attrs
import msgspec
import trio

from llmgw.node.doctor.patient import Patient
from llmgw.wire.control import Finding

PASS, WARN, FAIL, SKIPPED = "pass", "warn", "fail", "skipped"
#: Seconds for one check.
WITHIN = 3.0

Look = Callable[[Patient], Iterable[Finding]]
AsyncLook = Callable[[Patient], Awaitable[Sequence[Finding]]]
Number = float | int | str


@attrs.frozen
class Check:
    id: str
    look: Look | AsyncLook

    async def findings(self, patient: Patient) -> tuple[Finding, ...]:
        """At least one, always with this check's id and the time it took."""
        began = trio.current_time()
        found: Sequence[Finding]
        try:
            with trio.fail_after(WITHIN):
                if iscoroutinefunction(self.look):
                    found = await cast(AsyncLook, self.look)(patient)
                else:
                    look = cast(Look, self.look)
                    found = await trio.to_thread.run_sync(partial(_listed, look, patient), abandon_on_cancel=True)
        except trio.TooSlowError:
            found = [fail(f"the check did not come back within {WITHIN:g} s", "look for hanging devices or mounts")]
        except Exception as error:
            # The edge of one check: whatever goes wrong in it must not end the examination.
            found = [skipped(f"the check itself failed: {type(error).__name__}: {error}")]
        seconds = round(trio.current_time() - began, 3)
        listed = found or [skipped("nothing to look at here")]
        return tuple(msgspec.structs.replace(each, check=self.id, seconds=seconds) for each in listed)


def _listed(look: Look, patient: Patient) -> list[Finding]:
    return list(look(patient))


CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Look], Look]:
    """Make a function a check."""

    def register(look: Look) -> Look:
        assert name not in CHECKS
        CHECKS[name] = Check(name, look)
        return look

    return register


def check_async(name: str) -> Callable[[AsyncLook], AsyncLook]:
    """Make an async function a check."""

    def register(look: AsyncLook) -> AsyncLook:
        assert name not in CHECKS
        CHECKS[name] = Check(name, look)
        return look

    return register


def ok(text: str, **numbers: Number) -> Finding:
    return Finding(check="", outcome=PASS, text=text, numbers=numbers)


def warn(text: str, remedy: str, **numbers: Number) -> Finding:
    return Finding(check="", outcome=WARN, text=text, remedy=remedy, numbers=numbers)


def fail(text: str, remedy: str, **numbers: Number) -> Finding:
    return Finding(check="", outcome=FAIL, text=text, remedy=remedy, numbers=numbers)


def skipped(reason: str) -> Finding:
    return Finding(check="", outcome=SKIPPED, text=reason)
