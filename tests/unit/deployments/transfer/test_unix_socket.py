"""Messages between processes of one host: sent without waiting, and received by threads that survive a bad one."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from msgspec.json import Decoder

from deployments.telemetry.log_buffers import SERVE_LOGGER
from deployments.telemetry.metrics import Counter, ErrorLogCounter
from deployments.transfer import unix_socket
from deployments.transfer.unix_socket import Listener, Sender
from tests.unit.deployments.telemetry.added import Added
from tests.unit.deployments.transfer.stored_embeddings import eventually

PATIENCE_S = 60.0
MANY = 10_000
"""Many times what a socket has room for."""

Packet = dict[str, Any]
ANY: Decoder[Any] = Decoder()

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other
        for end in (one, other):  # or threads that read them would read what gets their numbers next
            unix_socket.shut_down(end)


def fill(connection: socket.socket) -> int:
    """Sends until the socket has no more room; how many packets that were."""
    connection.setblocking(False)
    try:
        for number in range(MANY):
            unix_socket.send(connection, {"number": number})
    except BlockingIOError:
        return number
    finally:
        connection.setblocking(True)
    raise AssertionError("the socket is never full")


def received(connection: socket.socket) -> Packet:
    came = unix_socket.receive(connection, ANY)
    assert came is not None
    return came[0]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def end_of_threads(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("size", [unix_socket.MAX_PACKET_BYTES, unix_socket.MAX_PACKET_BYTES + 1])
def test_packets_are_bounded(size: int, pair: Pair) -> None:
    one, other = pair
    packet = {"a": "x" * (size - len('{"a":""}'))}
    for send in (lambda: unix_socket.send(one, packet), lambda: Sender(one).send(packet)):
        if size > unix_socket.MAX_PACKET_BYTES:
            with pytest.raises(ValueError, match=str(size)):
                send()
        else:
            send()
            assert unix_socket.receive(other, ANY) == (packet, None)


def test_a_sender_does_not_wait_and_keeps_the_order(pair: Pair) -> None:
    sender = Sender(pair[0])
    for number in range(MANY):
        sender.send({"number": number})
    assert [received(pair[1])["number"] for _ in range(MANY)] == list(range(MANY))
    end_of_threads("packets")
    sender.send({"number": MANY})
    assert received(pair[1])["number"] == MANY


def test_two_that_answer_each_message_under_their_locks_do_not_wait_for_each_other(pair: Pair) -> None:
    """Two processes whose reading threads took a lock that was held by a thread of theirs that was sending stood still
    for ever once both sockets were full."""
    ended = SimpleQueue[int]()

    def talk(connection: socket.socket) -> None:
        sender, lock = Sender(connection), threading.Lock()
        answers = iter(range(1, MANY + 1))

        def handle(packet: Packet, _: int | None) -> None:
            with lock:
                if "ask" in packet:
                    sender.send({"answer": packet["ask"]})
                elif next(answers) == MANY:
                    ended.put(packet["answer"])

        threading.Thread(target=unix_socket.handle_messages, args=(connection, ANY, handle), daemon=True).start()
        for number in range(MANY):
            with lock:
                sender.send({"ask": number})

    for connection in pair:
        threading.Thread(target=talk, args=(connection,), daemon=True).start()
    assert [ended.get(timeout=PATIENCE_S) for _ in pair] == [MANY - 1] * 2


def test_threads_that_send_at_the_same_time_lose_nothing(pair: Pair) -> None:
    sender = Sender(pair[0])

    def send(name: int) -> None:
        for number in range(1000):
            sender.send({"of": name, "number": number})

    threads = [threading.Thread(target=send, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    came: dict[int, list[int]] = {name: [] for name in range(4)}
    for _ in range(4 * 1000):
        packet = received(pair[1])
        came[packet["of"]].append(packet["number"])
    assert came == {name: list(range(1000)) for name in range(4)}
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("full", [False, True], ids=["at once", "from the backlog"])
def test_a_file_arrives_though_its_sender_has_closed_it(full: bool, pair: Pair, tmp_path: Path) -> None:
    """Its number may belong to another file by the time that the packet is sent."""
    (tmp_path / "sent").write_text("the one that was sent")
    num_before = fill(pair[0]) if full else 0
    files = open_files()
    file = os.open(tmp_path / "sent", os.O_RDONLY)
    Sender(pair[0]).send({"map": 1}, file)
    os.close(file)
    for _ in range(num_before):
        received(pair[1])
    came = unix_socket.receive(pair[1], ANY)
    assert came is not None
    assert came[1] is not None
    assert os.read(came[1], 100) == b"the one that was sent"
    os.close(came[1])
    end_of_threads("packets")
    assert open_files() == files


def test_a_peer_that_ends_is_an_error_and_leaves_no_thread_and_no_file(pair: Pair, tmp_path: Path) -> None:
    fill(pair[0])
    files = open_files()
    sender = Sender(pair[0])
    with (tmp_path / "sent").open("w") as file:
        for _ in range(10):
            sender.send({"map": 1}, file.fileno())
    pair[1].close()
    end_of_threads("packets")
    with pytest.raises(OSError, match="ended"):
        sender.send({"give": 1})
    sender.close()
    assert open_files() == files - 1


def test_a_peer_that_reads_nothing_is_given_up_at_the_limit(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_socket, "MAX_BACKLOG", 100)
    sender = Sender(pair[0])

    def send_many() -> None:
        for number in range(MANY):
            sender.send({"number": number})

    with pytest.raises(OSError, match="100 packets are queued for the peer"):
        send_many()
    assert unix_socket.receive(pair[0], ANY) is None, "its reader sees the end"
    end_of_threads("packets")
    assert not sender._backlog
    with pytest.raises(OSError, match="ended"):
        sender.send({"number": MANY})


def test_without_a_thread_to_send_the_backlog_the_connection_ends(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fill(pair[0])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        Sender(pair[0]).send({"give": 1})
    assert unix_socket.receive(pair[0], ANY) is None


@pytest.fixture
def counts() -> Iterator[Added]:
    """What a replica would count of its log."""
    added, logger = Added(), logging.getLogger(SERVE_LOGGER)
    before = logger.filters[:]
    ErrorLogCounter.install(added)
    yield added
    logger.filters[:] = before


def test_a_bad_message_is_counted_and_does_not_end_the_listening(
    pair: Pair, counts: Added, caplog: pytest.LogCaptureFixture
) -> None:
    """One exception ended the thread, and with it all that its process could be told."""
    handled = SimpleQueue[int]()

    def handle(packet: Packet, _: int | None) -> None:
        handled.put(10 // packet["number"])

    thread = threading.Thread(target=unix_socket.handle_messages, args=(pair[1], ANY, handle), daemon=True)
    thread.start()
    for written in (b'{"number": 0}', b"{", b"[]", b"[" * 50_000, b'{"other": 1}', b'{"number": 5}'):
        pair[0].send(written)
    assert handled.get(timeout=PATIENCE_S) == 2
    assert sorted(caplog.messages) == 2 * ["a message could not be read"] + 3 * ["the handling of a message failed"]
    assert counts.added == {(Counter.ERRORS_LOGGED, "unix_socket"): 5}
    unix_socket.shut_down(pair[0])
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_file_that_comes_with_a_bad_message_is_closed(pair: Pair) -> None:
    files = open_files()
    socket.send_fds(pair[0], [b"{"], [pair[0].fileno()])
    with pytest.raises(ValueError, match="truncated"):
        unix_socket.receive(pair[1], ANY)
    assert open_files() == files


def test_a_descriptor_is_closed_by_the_thread_that_reads_it() -> None:
    """Another thread closed it, and a new connection got its number. The reading thread, which was about to read, then
    took the first message of that one: two processes waited for each other for ever."""
    reading, closed = threading.Event(), threading.Event()
    served: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        served.append(connection)
        reading.set()
        assert closed.wait(PATIENCE_S)
        assert connection.fileno() >= 0
        assert connection.recv(1) == b"", "the other thread has ended the connection all the same"

    listener = Listener(serve, name="served")
    with unix_socket.connect(listener.address, timeout_s=PATIENCE_S) as connection:
        assert reading.wait(PATIENCE_S)
        listener.close()
        assert listener._listener_socket.fileno() == -1, "nobody accepts any more"
        assert connection.recv(1) == b""
        number = served[0].fileno()
        closed.set()
        eventually(lambda: listener.num_connections == 0)
        assert (number >= 0, served[0].fileno()) == (True, -1)


def test_a_sender_closes_its_own_descriptor_when_none_of_its_threads_sends(pair: Pair) -> None:
    files = open_files()
    idle = Sender(pair[0])
    idle.close()
    assert open_files() == files
    with pytest.raises(ConnectionAbortedError):
        idle.send({"number": 1})


def test_a_sender_that_is_closed_while_it_waits_for_room(pair: Pair) -> None:
    files = open_files()
    sender = Sender(pair[0])
    fill(pair[0])
    sender.send({"number": 1})
    assert sender._backlog
    sender.close()
    eventually(lambda: open_files() == files)
    with pytest.raises(ConnectionAbortedError):
        sender.send({"number": 2})
    sender.close()


def echo(connection: socket.socket) -> None:
    unix_socket.handle_messages(connection, ANY, lambda packet, _: unix_socket.send(connection, packet))


def asked(listener: Listener) -> Packet:
    with unix_socket.connect(listener.address, timeout_s=PATIENCE_S) as connection:
        unix_socket.send(connection, {"there": True})
        return received(connection)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ECONNABORTED])
def test_a_connection_that_is_not_accepted_does_not_end_the_accepting(
    error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The accepting thread ended at its first error, and everybody who called from then on waited 5 s in vain."""
    errors, accept = [error, error], unix_socket.accept

    def fail_first(listening: socket.socket) -> socket.socket:
        if errors:
            raise OSError(errors.pop(), "of the first two")
        return accept(listening)

    monkeypatch.setattr(unix_socket, "accept", fail_first)
    with closing(Listener(echo, name="test")) as listener:
        assert asked(listener) == {"there": True}
        assert sum("could not be accepted" in message for message in caplog.messages) == 2
        assert listener.is_alive


def test_a_connection_without_a_thread_is_closed_and_the_next_one_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start
    with closing(Listener(echo, name="test")) as listener:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with unix_socket.connect(listener.address, timeout_s=PATIENCE_S) as connection:
            assert unix_socket.receive(connection, ANY) is None
        eventually(lambda: any("could not be accepted" in message for message in caplog.messages))
        monkeypatch.setattr(threading.Thread, "start", start)
        assert asked(listener) == {"there": True}


def test_a_connection_whose_serving_fails_is_closed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: socket.socket) -> None:
        raise KeyError("num_bytes")

    with closing(Listener(fail, name="test")) as listener:
        with unix_socket.connect(listener.address, timeout_s=PATIENCE_S) as connection:
            assert unix_socket.receive(connection, ANY) is None
        assert caplog.messages == ["a connection could not be served"]
        assert listener.is_alive


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_accepting_thread_is_told_from_a_closed_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Listener(echo, name="test")) as listener:
        assert listener.is_alive
    assert listener.is_alive
    listener._thread.join(PATIENCE_S)
    assert not listener._thread.is_alive()

    def die(_: socket.socket) -> socket.socket:
        raise SystemExit

    monkeypatch.setattr(unix_socket, "accept", die)
    with closing(Listener(echo, name="test")) as listener:
        listener._thread.join(PATIENCE_S)
        assert not listener.is_alive


def test_a_listener_that_closes_ends_its_connections() -> None:
    with closing(Listener(echo, name="test")) as listener:
        connection = unix_socket.connect(listener.address, timeout_s=PATIENCE_S)
        unix_socket.send(connection, {"there": True})
        received(connection)
    with connection:
        assert unix_socket.receive(connection, ANY) is None
    with pytest.raises(OSError, match="refused"):
        unix_socket.connect(listener.address, timeout_s=PATIENCE_S)
