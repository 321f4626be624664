"""The highest plane epoch that this agent has obeyed, kept over restarts, so that an older plane is refused (D4)."""

from __future__ import annotations

from pathlib import Path

import attrs
import structlog

from llmgw.errors import LlmgwError
from llmgw.files import write_whole
from llmgw.node.stream import Outdated
from llmgw.wire.control import Registered

log = structlog.get_logger("llmgw.epoch")

#: The file's name in the agent's directory.
EPOCH = "epoch"


@attrs.define
class Epoch:
    """A number in a file; joining a plane anew removes the file."""

    path: Path
    value: int = 0
    _written: bool = True

    @classmethod
    def load(cls, path: Path) -> Epoch:
        """What the file says, 0 when there is none. A file that cannot be read is said and taken for none."""
        try:
            return cls(path, int(path.read_text()))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError) as error:
            log.warning("the epoch cannot be read; any plane is obeyed", path=str(path), error=str(error))
            return cls(path)

    def reload(self) -> None:
        """Take what is on disk now: whoever joins anew, to a plane that counts from 1, removes the file."""
        if self._written:
            self.value = Epoch.load(self.path).value

    def obey(self, registered: Registered) -> None:
        """Take a plane's epoch. Raises Outdated for one that is lower than what was obeyed before."""
        if registered.epoch < self.value:
            raise Outdated(
                f"{registered.plane} leads by epoch {registered.epoch}, and this node has obeyed {self.value}: "
                "another plane leads, or this one was restored from a backup (then run `llmgw-plane restored` there)"
            )
        if registered.epoch > self.value:
            self.value = registered.epoch
            try:
                write_whole(self.path, f"{registered.epoch}\n".encode())
                self._written = True
            except LlmgwError as error:
                # A full disk must not keep the node from its plane; until the next restart it is known here.
                self._written = False
                log.error("the plane's epoch could not be written down", epoch=registered.epoch, error=str(error))
