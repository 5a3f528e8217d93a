# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy before a server, whose answers come at a rate, or not at all."""

import contextlib
import socket
import threading
import time


class SlowProxy:
    """Passes on what clients and a server on a port of this machine say to each other.

    rate: bytes a second of each connection's answers; None = as fast as they come, 0 = silence. It may be changed at
    any time."""

    def __init__(self, port: int, rate: float | None) -> None:
        self.rate = rate
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._server.getsockname()[1]}"
        self._open = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._port))
                self._open += [client, server]
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _pass_on(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(self._piece()):
                while self.rate == 0:
                    time.sleep(0.01)
                if self.rate:
                    time.sleep(len(data) / self.rate)
                client.sendall(data)

    def _piece(self) -> int:
        """About a hundredth of a second."""
        return min(1 << 16, max(256, int(self.rate / 100))) if self.rate else 1 << 16

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
