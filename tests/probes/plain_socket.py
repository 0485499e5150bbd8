"""A socket test with nothing of costlab in it: two processes, one message there and back, times on stdout as JSON.

`python plain_socket.py SIZE REPEATS`: the parent sends and receives, a child of it echoes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time


def read(link: socket.socket, buffer: memoryview) -> None:
    got = 0
    while got < len(buffer):
        n = link.recv_into(buffer[got:])
        assert n, "closed"
        got += n


def main() -> None:
    size, repeats = int(sys.argv[1]), int(sys.argv[2])
    server = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        link = socket.create_connection(server.getsockname())
    else:
        link, _ = server.accept()
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    out, back = memoryview(bytearray(b"x" * size)), memoryview(bytearray(size))
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        if child:
            link.sendall(out)
            read(link, back)
        else:
            read(link, back)
            link.sendall(out)
        times.append((time.perf_counter() - start) / 2)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    print(json.dumps(times[2:]))


if __name__ == "__main__":
    main()
