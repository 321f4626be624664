"""The only place that calls NVML: its many ways to fail become three.

`None` is "this GPU, this driver or this process may not have it". `Lost` is "this GPU cannot be used, go on
with the others". `Refused` is "there is no driver to ask, and this process never will have one".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import pynvml

P = ParamSpec("P")
T = TypeVar("T")

UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND = 1, 3, 4, 6
DRIVER_NOT_LOADED, TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 9, 10, 12, 13
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, ARGUMENT_VERSION = 15, 16, 18, 25
GPU_NOT_FOUND, UNKNOWN = 28, 999
GARBLED = -1  # not NVML's: the binding could not make sense of the answer

#: Codes that end one GPU's usefulness.
LOST = frozenset({GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND})
#: Codes after which no call of this process can succeed.
REFUSED = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, VERSION_MISMATCH})
#: Codes that will be the same next time: not asked again in this process.
LASTING = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION})


class Lost(Exception):
    """One GPU is unusable. `code` is NVML's."""

    def __init__(self, code: int, call: str) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code
        self.call = call


class Refused(Exception):
    """No driver can be asked. `code` is NVML's."""

    def __init__(self, code: int) -> None:
        super().__init__(str(code))
        self.code = code


class Calls:
    """NVML's functions about one GPU, or about the system. Remembers what will never be answered."""

    def __init__(self) -> None:
        self._mute: set[object] = set()
        self.last_code = 0  # of the last call that gave None

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """The function's value, or None. Raises Lost and Refused."""
        name = getattr(function, "__name__", "")
        # One function may be answered for one error type and not for another.
        what: object = (name, *args[1:]) if len(args) > 2 and all(isinstance(each, int) for each in args[1:]) else name
        if what in self._mute:
            self.last_code = NOT_SUPPORTED
            return None
        self.last_code = 0
        try:
            return function(*args, **kwargs)
        except pynvml.NVMLError as error:
            code = error.value
        except (UnicodeDecodeError, ctypes.ArgumentError, AttributeError, TypeError, ValueError):
            # A garbled string, or a binding that does not fit the library: the value is not to be had.
            code = GARBLED
        self.last_code = code
        if code in LOST:
            raise Lost(code, name)
        if code in REFUSED:
            raise Refused(code)
        if code in LASTING:
            self._mute.add(what)
        return None


def must(value: T | None, calls: Calls, call: str) -> T:
    """A value without which a GPU is of no use (its handle, its uuid)."""
    if value is None:
        raise Lost(calls.last_code or UNKNOWN, call)
    return value
