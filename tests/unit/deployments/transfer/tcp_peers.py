"""Peers of TCP: what a test says and hears as one of them, and what it makes of a client and a server."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable

import torch

from configs.schema import TcpConfig
from deployments.common.messages import EncodedImage
from deployments.transfer import tcp
from deployments.transfer.header import Header
from deployments.transfer.receive_buffer import ReceiveBuffer
from deployments.transfer.tcp_client import TcpClient
from deployments.transfer.tcp_server import TcpServer
from tests.unit.deployments.transfer.stored_embeddings import PATIENCE_S, read

SECRET, OTHER = b"a" * 32, b"b" * 32
MIB = 2**20
LOCAL = TcpConfig(listen_on="127.0.0.1")
Play = Callable[[socket.socket], None]


def fetched(client: TcpClient, image: EncodedImage, *, direct_read: bool = False) -> torch.Tensor:
    return read(client.fetch(Header.of(image), direct_read=direct_read).result(PATIENCE_S))


def is_free(buffer: ReceiveBuffer) -> bool:
    gc.collect()
    return buffer.arena.free_bytes == buffer.arena.num_bytes


def plays(play: Play) -> tuple[str, threading.Thread]:
    """The address of a peer that does what `play` says on its first connection, and ends it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            play(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


def connected(server: TcpServer, secret: bytes | None = SECRET) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), PATIENCE_S)
    if secret is not None:
        tcp.authenticate_server(connection, secret)
    connection.settimeout(PATIENCE_S)
    return connection
