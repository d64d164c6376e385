"""The data lines of a server-sent event stream, each as soon as its last byte is there."""

from __future__ import annotations

from collections.abc import AsyncIterator


async def data_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    r"""The payloads of the ``data:`` lines in ``chunks``.

    Lines end at ``\n`` alone (``\r`` before it is dropped): splitting as text would also break
    lines at U+2028 and the like, which stand raw inside JSON strings.
    """
    held = b""
    async for chunk in chunks:
        *lines, held = (held + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()
    if held.startswith(b"data:"):
        yield held[5:].strip()
