"""Files as the admin server sends them: closed also when the client leaves at the moment in which they are opened."""

from __future__ import annotations

from quart_trio.wrappers.response import TrioFileBody, TrioResponse


class FileBody(TrioFileBody):
    """Quart's own leaves an open file behind when it is cancelled between the opening and the first read."""

    async def __aenter__(self) -> FileBody:
        try:
            await super().__aenter__()
        except BaseException:
            if self.file is not None:
                self.file.wrapped.close()
            raise
        return self


class FileResponse(TrioResponse):
    file_body_class = FileBody
