"""An encoder's process that serves one large embedding by TCP. The line on stdout is where it is.

A program, since it runs in another network namespace, and a test kills it.
"""

from __future__ import annotations

import json
import sys
import time

from configs.schema import TcpConfig
from deployments.transfer.shared_store import EmbeddingStore
from deployments.transfer.tcp_server import TcpServer
from tests.unit.deployments.transfer.stored_embeddings import encoded


def main(tokens: int, secret: bytes, listen_on: str) -> None:
    store = EmbeddingStore(2**30)
    server = TcpServer(store, secret, TcpConfig(listen_on=listen_on))
    image = encoded(store, tokens=tokens)
    store.publish(image)
    print(json.dumps({"tcp": server.address}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3])
