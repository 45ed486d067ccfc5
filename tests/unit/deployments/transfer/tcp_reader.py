"""A language model's process that reads an embedding by TCP, whose host is lost meanwhile. It prints what happened."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import time

from benchmarks.transfer import namespaces
from deployments.transfer import tcp
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.same_host import EmbeddingUnavailableError
from deployments.transfer.tcp_client import TcpClient
from tests.unit.deployments.transfer.stored_embeddings import header


def main(address: str, tokens: int, secret: bytes, loss: str) -> dict[str, object]:
    """`loss`: "killed", "unplugged" or "none"."""
    buffer, errors, received = ReceiveBuffer(2**30), [], []
    receive_into = tcp.receive_into

    def read(connection: socket.socket, target: memoryview, deadline: float) -> None:
        if len(target) > 2**20 and loss != "none":  # the embedding: read a part, then lose the host
            receive_into(connection, target[: 2**20], deadline)
            target = target[2**20 :]
            if loss == "killed":
                namespaces.kill(1)
            else:
                subprocess.run(["ip", "link", "set", "vitray0", "down"], check=True)
            received.append(time.monotonic())
        receive_into(connection, target, deadline)

    tcp.receive_into = read
    client = TcpClient(address, secret, buffer, on_error=lambda error: errors.append(error.value))
    try:
        client.fetch(header(1, tokens=tokens), direct_read=True).result(60).release()
    except EmbeddingUnavailableError as error:
        return {
            "error": str(error),
            "errors": errors,
            "seconds": time.monotonic() - received[0],
            "free": (gc.collect(), buffer.arena.free_bytes == buffer.num_bytes)[1],
        }
    return {"errors": errors}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), sys.argv[4])))
