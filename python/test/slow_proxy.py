# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy before a server: its answers come at a rate, or not at all, and a fault happens at a given command."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable


class SlowProxy:
    """Passes on what clients and a server on a port of this machine say to each other.

    rate: bytes a second of each connection's answers; None = as fast as they come, 0 = silence. It may be changed at
    any time."""

    def __init__(self, port: int, rate: float | None) -> None:
        self.rate = rate
        self._port = port
        self._fault: tuple[bytes, Callable[[], object]] | None = None
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}"
        self._open = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def at_next(self, command: str, fault: Callable[[], object]) -> None:
        """Calls `fault` once, before the next such command of a client is passed on."""
        self._fault = (b"$%d\r\n%s\r\n" % (len(command), command.encode()), fault)

    def is_armed(self) -> bool:
        """The fault of at_next has not happened yet."""
        return self._fault is not None

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                self._open.append(client)
                try:
                    server = socket.create_connection(("127.0.0.1", self._port))
                except OSError:  # nobody is there
                    client.close()
                    continue
                self._open.append(server)
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                self._fail_at(data)
                server.sendall(data)
        self._end(client, server)

    def _fail_at(self, data: bytes) -> None:
        if self._fault is not None and self._fault[0] in data:
            _, fault = self._fault
            fault()
            self._fault = None

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(self._piece()):
                while self.rate == 0:
                    time.sleep(0.01)
                if self.rate:
                    time.sleep(len(data) / self.rate)
                client.sendall(data)
        self._end(client, server)

    def _piece(self) -> int:
        """About a hundredth of a second."""
        return min(1 << 16, max(256, int(self.rate / 100))) if self.rate else 1 << 16

    def close(self) -> None:
        self._end(*self._open)

    def _end(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
