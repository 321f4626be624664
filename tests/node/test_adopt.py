import pytest
from msgspec import structs

from llmgw.node.adopt import Known, verify
from llmgw.node.processes import Seen
from tests.node.test_records import record

RECORD = structs.replace(record(), pid=100, started=5000, boot="boot-1", token="secret")
SEEN = Seen(100, "llama-server", "S", 1, 100, 100, 5000)
ENV = {"LLMGW_TOKEN": "secret", "LLMGW_SHARD": "m/0/0"}


def test_number_start_time_boot_and_token_together_are_proof() -> None:
    assert verify(RECORD, SEEN, ENV, "boot-1").known is Known.OURS


@pytest.mark.parametrize(
    ("seen", "environment", "boot", "known"),
    [
        (None, None, "boot-1", Known.GONE),
        (SEEN, ENV, "boot-2", Known.GONE),
        (Seen(100, "x", "S", 1, 100, 100, 5001), ENV, "boot-1", Known.GONE),
        (Seen(100, "x", "Z", 1, 100, 100, 5000), ENV, "boot-1", Known.GONE),
        (SEEN, None, "boot-1", Known.UNSURE),
        (SEEN, {}, "boot-1", Known.UNSURE),
        (SEEN, {**ENV, "LLMGW_TOKEN": "other"}, "boot-1", Known.UNSURE),
        (SEEN, ENV, "", Known.UNSURE),
    ],
)
def test_what_is_missing_from_the_proof_decides(
    seen: Seen | None, environment: dict[str, str] | None, boot: str, known: Known
) -> None:
    verdict = verify(RECORD, seen, environment, boot)
    assert verdict.known is known
    assert verdict.text != ""
