"""What pip 26 and uv 0.13 said when an installation failed, and what is made of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.node.installs.causes import LASTING, ROWS, probable

RETRY = (
    "WARNING: Retrying (Retry(total={left}, connect=None, read=None, redirect=None, status=None)) after connection"
    " broken by 'NewConnectionError(\"HTTPConnection(host='127.0.0.1', port=9): Failed to establish a new connection:"
    " [Errno 111] Connection refused\")': /simple/vllm/"
)
NONE = (
    "ERROR: Could not find a version that satisfies the requirement vllm==0.32.0 (from versions: 0.9.0)",
    "ERROR: No matching distribution found for vllm==0.32.0",
)
IGNORED = "ERROR: Ignored the following versions that require a different python version: {} Requires-Python >=3.14"

SAID = [
    ("no-version", NONE),
    ("no-version", (IGNORED.format("0.1.0"), *NONE)),
    ("python-too-old", (IGNORED.format("0.32.0"), *NONE)),
    ("no-network", (RETRY.format(left=4), RETRY.format(left=0), *NONE)),
    # A later try got through: the index was asked, and has no such version.
    ("no-version", (RETRY.format(left=4), *NONE)),
    (
        "no-requirement",
        ("ERROR: No matching distribution found for torch==2.13.0+cpu (from vllm)",),
    ),
    ("python-too-old", ("ERROR: Package 'vllm' requires a different Python: 3.11.7 not in '>=3.99'",)),
    ("broken-wheel", ("ERROR: Wheel 'vllm' located at /w/vllm-0.32.0-py3-none-any.whl is invalid.",)),
    ("broken-wheel", ("zipfile.BadZipFile: Bad CRC-32 for file 'vllm/__init__.py'",)),
    (
        "broken-wheel",
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "do not match the hashes"),
    ),
    ("other-platform", ("ERROR: vllm-1.0-cp311-cp311-win_amd64.whl is not a supported wheel on this platform.",)),
    ("no-disk", ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",)),
    ("no-venv", ("Error: Command '[...]' returned non-zero exit status 1.", "ensurepip is not available.")),
    ("conflict", ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/",)),
    ("no-compiler", ("ERROR: Failed building wheel for sgl-kernel",)),
    ("permission", ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/x'",)),
    ("not-allowed", ("ERROR: HTTP error 403 while getting https://mirror/vllm.whl",)),
    (
        "not-trusted",
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed'))",),
    ),
    # uv
    (
        "no-version",
        ("  cause: Because there is no version of vllm==0.32.0 and you require vllm==0.32.0, we can conclude",),
    ),
    (
        "no-version",
        ("  cause: Because vllm was not found in the provided package locations and you require vllm==0.32.0",),
    ),
    (
        "no-requirement",
        ("  cause: Because torch was not found in the package registry and all versions of vllm depend on torch==2",),
    ),
    (
        "other-platform",
        ("  cause: Because vllm==0.32.0 has no wheels with a matching platform tag (e.g., `manylinux_2_36_x86_64`)",),
    ),
    (
        "python-too-old",
        (
            "  cause: Because the current Python version (3.11.7) does not satisfy Python>=3.14 and vllm==0.32.0"
            " depends on Python>=3.14, we can conclude that your requirements are unsatisfiable.",
        ),
    ),
    ("python-too-old", ("  cause: Because vllm==0.32.0 requires Python >=3.99 and you require vllm==0.32.0, we can",)),
    ("other-platform", ("  cause: Because vllm==0.32.0 has no usable wheels and you require vllm==0.32.0",)),
    (
        "broken-wheel",
        ("  cause: Bad CRC (got a4d83a65, expected 9c95be09)", "  cause: Failed to extract archive: /w/v.whl"),
    ),
    ("broken-wheel", ("Because vllm==0.32.0 has an invalid package format", "  Failed to read from zip file")),
    ("no-network", ("  cause: dns error", "  cause: failed to lookup address information: Name or service not known")),
    ("no-network", ("  cause: Connection refused (os error 111)",)),
    ("conflict", ("  cause: all versions of bbb and all versions of vllm are incompatible.",)),
    ("no-disk", ("  cause: failed to write to file: No space left on device (os error 28)",)),
    ("no-python", ("nice: '/opt/python3.12': No such file or directory",)),
    ("no-python", ("llmgw: 1: exec: /opt/python3.12: not found",)),
    ("no-python", ("error: No interpreter found for path `/opt/python3.12`",)),
]


@pytest.mark.parametrize(("code", "lines"), SAID)
def test_what_an_installer_said_has_a_cause_and_a_remedy(code: str, lines: tuple[str, ...]) -> None:
    cause = probable(lines, "vllm", "0.32.0")
    assert cause is not None
    assert cause.code == code
    assert cause.text
    assert cause.remedy


def test_a_requirement_that_is_nowhere_is_named() -> None:
    cause = probable(("ERROR: No matching distribution found for torch==2.13.0+cpu (from vllm)",), "vllm", "0.32.0")
    assert cause is not None
    assert cause.text == "one of its requirements, torch, is not in the index for this platform and Python"


def test_what_no_row_knows_has_no_cause() -> None:
    assert probable(("something new",), "vllm", "1") is None


def test_what_no_other_try_will_mend_is_known_by_code() -> None:
    assert {row.code for row in ROWS} | {"no-requirement"} >= LASTING


@given(st.lists(st.text(max_size=200), max_size=20), st.text(max_size=20))
def test_any_output_has_an_answer(lines: list[str], version: str) -> None:
    probable(lines, "vllm", version)
