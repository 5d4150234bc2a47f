"""A network between a client and the S3 server that a test can cut, mend and make lose things."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from tests.s3_server import S3Server, free_ports

BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Network:
    """A TCP relay; starts cut. Faults count connections, and every faulty connection is closed."""

    def __init__(self, server: S3Server) -> None:
        self.port = free_ports(1)[0]
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self.busy = 0
        """The next so many requests are answered with 503 SlowDown."""
        self.lose_answers = 0
        """The next so many requests reach the server, their answers are lost."""
        self._target = int(server.endpoint_url.rpartition(":")[2])
        self._sockets: list[socket.socket] = []

    def mend(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self._sockets.append(listener)
        threading.Thread(target=self._serve, args=[listener], daemon=True).start()

    def cut(self) -> None:
        for each in self._sockets:
            _close(each)
        self._sockets.clear()

    def cut_connections(self) -> None:
        """Ends what is open, so that the next request makes a new connection; new ones are taken."""
        for each in self._sockets[1:]:
            _close(each)
        del self._sockets[1:]

    def _serve(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                if self.busy:
                    self.busy -= 1
                    client.recv(2**16)
                    client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: %d\r\n\r\n%s" % (len(BUSY), BUSY))
                    _close(client)
                    continue
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                losing = self.lose_answers > 0
                self.lose_answers -= losing
                threading.Thread(target=self._pump, args=[client, server, False], daemon=True).start()
                threading.Thread(target=self._pump, args=[server, client, losing], daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, losing: bool) -> None:
        with suppress(OSError):
            while data := source.recv(2**16):
                if losing and not data.startswith(b"HTTP/1.1 100"):
                    _close(sink)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def _close(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
