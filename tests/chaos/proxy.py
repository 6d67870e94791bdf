"""A TCP proxy that makes the way to the ledger slow, cuts it, or closes it; in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable


class Proxy:
    """``port`` forwards to ``target``: ``delay_s`` holds every piece back, ``cut`` breaks what is open, ``closed`` refuses."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.delay_s = 0.0
        self.closed = False
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Proxy:
        """Listen."""
        self._thread.start()
        self._ready.wait(10)
        return self

    def stop(self) -> None:
        """Break everything and end the thread."""
        self.closed = True
        self._in_loop(self._break)
        self._in_loop(self._loop.stop)
        self._thread.join(5)

    def cut(self) -> None:
        """Break every open connection."""
        self._in_loop(self._break)

    def _in_loop(self, what: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    def _break(self) -> None:
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, up_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pieces in their order, each ``delay_s`` late."""
        line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due_s, piece = await line.get()
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                writer.write(piece)
                await writer.drain()

        delivery = asyncio.ensure_future(deliver())
        try:
            while piece := await reader.read(65536):
                line.put_nowait((self._loop.time() + self.delay_s, piece))
        except OSError:
            pass  # the other side broke it
        finally:
            delivery.cancel()
            writer.transport.abort()
