"""Embeddings lent through shared memory: whole, for as long as they are held, and gone with whoever held them."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from deployments import packets
from deployments.arena import PAGE_BYTES
from deployments.embedding_header import HEADER_BYTES, Header, WrongEmbeddingError, check
from deployments.embedding_shelf import EmbeddingShelf
from deployments.encoder import EncoderReplica
from deployments.lending import Borrowed, GoneError, Held, Lender
from deployments.wire import EncodedImage, EncodeTimings
from encoder.cache import EmbeddingCache

ROOT = Path(__file__).parents[3]
TIMINGS = EncodeTimings(1.0, 2.0, 3.0, 4.0, cached=False)
WIDTH = 64
PATIENCE_S = 60.0


def digest(number: int) -> str:
    return f"{number:064x}"


def encoded(
    shelf: EmbeddingShelf, number: int = 1, *, tokens: int = 6, dtype: torch.dtype = torch.bfloat16
) -> EncodedImage:
    room = shelf.room(tokens, WIDTH, dtype)
    assert room is not None
    room.copy_(torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(number)))
    return EncodedImage.pack(room, (1, 4, tokens), digest(number), TIMINGS)


def eventually(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.01)


@pytest.fixture
def shelf() -> EmbeddingShelf:
    return EmbeddingShelf(2**20)


@pytest.fixture
def lender(shelf: EmbeddingShelf) -> Iterator[Lender]:
    with closing(Lender(shelf)) as lender:
        yield lender


@pytest.fixture
def borrowed(lender: Lender) -> Iterator[Borrowed]:
    with closing(Borrowed(lender.address)) as borrowed:
        yield borrowed


def hold(borrowed: Borrowed, image: EncodedImage) -> Held:
    return Held(image.lent_by(borrowed.address), borrowed, borrowed.hold(image.digest).result(PATIENCE_S))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_embedding_arrives_bit_by_bit_and_uncopied(
    dtype: torch.dtype, shelf: EmbeddingShelf, borrowed: Borrowed
) -> None:
    image = encoded(shelf, dtype=dtype)
    assert shelf.offer(image)
    found = hold(borrowed, image).tensor()
    assert found.dtype == dtype
    assert torch.equal(found, image.unpack(width=WIDTH, merge_size=2))
    image.bits[0, 0] += 1
    assert torch.equal(found, image.unpack(width=WIDTH, merge_size=2)), "it is the same memory"


def test_what_is_held_stays_and_what_is_released_makes_room(shelf: EmbeddingShelf, borrowed: Borrowed) -> None:
    whole = shelf.arena.free_bytes
    image = encoded(shelf)
    shelf.offer(image)
    held = hold(borrowed, image)
    name, expected = image.digest, image.unpack(width=WIDTH, merge_size=2).clone()
    del image
    gc.collect()
    assert shelf.arena.free_bytes < whole
    assert torch.equal(held.tensor(), expected)
    held.release()
    eventually(lambda: shelf.arena.free_bytes == whole)
    with pytest.raises(GoneError):
        borrowed.hold(name).result(PATIENCE_S)


def test_every_holder_counts(shelf: EmbeddingShelf, borrowed: Borrowed, lender: Lender) -> None:
    whole = shelf.arena.free_bytes
    image = encoded(shelf)
    shelf.offer(image)
    first, second = hold(borrowed, image), hold(borrowed, image)
    with closing(Borrowed(lender.address)) as other:
        third = hold(other, image)
        del image
        first.release()
        third.release()
        third.release()  # once too often: it is nobody else's
        with pytest.raises(GoneError):
            other.hold(digest(2)).result(PATIENCE_S)  # answers come in order: what was released before has been
        assert shelf.arena.free_bytes < whole
        second.release()
        eventually(lambda: shelf.arena.free_bytes == whole)


def test_an_offer_that_nobody_comes_for_ends() -> None:
    now = [0.0]
    shelf = EmbeddingShelf(2**20, offered_s=10.0, clock=lambda: now[0])
    whole = shelf.arena.free_bytes
    shelf.offer(encoded(shelf))
    gc.collect()
    now[0] = 9.9
    shelf.prune()
    assert shelf.arena.free_bytes < whole
    now[0] = 10.0
    shelf.prune()
    assert shelf.arena.free_bytes == whole


def test_offers_that_are_over_make_room_when_there_is_none() -> None:
    now = [0.0]
    shelf = EmbeddingShelf(2 * (HEADER_BYTES + 4096), offered_s=10.0, clock=lambda: now[0])
    for number in range(2):
        shelf.offer(encoded(shelf, number))
    assert shelf.room(6, WIDTH, torch.bfloat16) is None
    now[0] = 10.0
    assert shelf.room(6, WIDTH, torch.bfloat16) is not None


def test_an_embedding_of_other_memory_is_not_offered(shelf: EmbeddingShelf, borrowed: Borrowed) -> None:
    image = EncodedImage.pack(torch.zeros(6, WIDTH), (1, 4, 6), digest(1), TIMINGS)
    assert not shelf.offer(image)
    with pytest.raises(GoneError):
        borrowed.hold(image.digest).result(PATIENCE_S)


def test_another_embedding_in_its_place_is_told_from_it(shelf: EmbeddingShelf, borrowed: Borrowed) -> None:
    image = encoded(shelf)
    shelf.offer(image)
    held = hold(borrowed, image)
    shelf.offer(EncodedImage(digest(2), image.grid_thw, image.dtype, image.bits, TIMINGS))
    with pytest.raises(WrongEmbeddingError, match=digest(2)[:12]):
        held.tensor()


def test_memory_that_is_being_written_holds_nothing(shelf: EmbeddingShelf, borrowed: Borrowed) -> None:
    """Its last embedding's header does not outlive it."""
    image = encoded(shelf)
    shelf.offer(image)
    held = hold(borrowed, image)
    start = held.start
    del image
    held.release()
    eventually(lambda: shelf.arena.free_bytes == shelf.arena.num_bytes)
    kept = shelf.room(6, WIDTH, torch.bfloat16)
    assert kept is not None
    assert held.start == start
    with pytest.raises(WrongEmbeddingError, match="no embedding"):
        held.tensor()


@pytest.mark.parametrize(
    "other",
    [
        Header(digest(2), "bfloat16", (6, 64), (1, 4, 6)),
        Header(digest(1), "float32", (6, 64), (1, 4, 6)),
        Header(digest(1), "bfloat16", (3, 128), (1, 4, 6)),
        Header(digest(1), "bfloat16", (6, 64), (1, 6, 4)),
    ],
)
def test_every_field_of_a_header_counts(other: Header) -> None:
    written = Header(digest(1), "bfloat16", (6, 64), (1, 4, 6)).written()
    check(written, Header(digest(1), "bfloat16", (6, 64), (1, 4, 6)))
    with pytest.raises(WrongEmbeddingError):
        check(written, other)


def test_a_torn_header_is_none() -> None:
    expected = Header(digest(1), "bfloat16", (6, 64), (1, 4, 6))
    written = bytearray(expected.written())
    written[20] ^= 1
    with pytest.raises(WrongEmbeddingError, match="no embedding"):
        check(bytes(written), expected)
    with pytest.raises(WrongEmbeddingError, match="no embedding"):
        check(expected.written()[:10], expected)


def test_nobody_listens() -> None:
    with pytest.raises(GoneError):
        Borrowed("vitray-nobody")


def test_a_lender_that_closes_answers_those_who_wait_and_keeps_what_is_held(
    shelf: EmbeddingShelf, lender: Lender, borrowed: Borrowed
) -> None:
    image = encoded(shelf)
    shelf.offer(image)
    held = hold(borrowed, image)
    expected = held.tensor().clone()
    lender.close()
    eventually(lambda: not borrowed.alive)
    with pytest.raises(GoneError):
        borrowed.hold(image.digest).result(PATIENCE_S)
    held.release()  # of no effect, and no error
    assert torch.equal(held.tensor(), expected)


def test_another_user_is_not_served(monkeypatch: pytest.MonkeyPatch, shelf: EmbeddingShelf, lender: Lender) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(GoneError):
        Borrowed(lender.address)


@pytest.mark.parametrize("size", [packets.MAX_PACKET_BYTES, packets.MAX_PACKET_BYTES + 1])
def test_packets_are_bounded(size: int) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        packet = {"a": "x" * (size - len('{"a": ""}'))}
        if size > packets.MAX_PACKET_BYTES:
            with pytest.raises(ValueError, match=str(size)):
                packets.send(one, packet)
        else:
            packets.send(one, packet)
            assert packets.receive(other) == (packet, None)


LENDS = """
import sys, torch
from deployments.embedding_shelf import EmbeddingShelf
from deployments.encoder import EncoderReplica
from deployments.lending import Lender
from tests.unit.deployments.test_lending import encoded
shelf = EmbeddingShelf(2**20)
lender = Lender(shelf)
image = encoded(shelf)
shelf.offer(image)
print(lender.address, flush=True)
sys.stdin.read()
"""

BORROWS = """
import sys
from deployments.lending import Borrowed
from tests.unit.deployments.test_lending import digest
borrowed = Borrowed(sys.argv[1])
borrowed.hold(digest(1)).result(60)
print("holds", flush=True)
sys.stdin.read()
"""


def other_process(program: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def names_here() -> set[str]:
    """All that a process could leave behind: files in shared memory, and sockets of ours."""
    sockets = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@vitray-" in line}
    return sockets | {path.name for path in Path("/dev/shm").iterdir() if "vitray" in path.name}


@pytest.mark.slow
def test_a_killed_borrower_holds_nothing(shelf: EmbeddingShelf, lender: Lender) -> None:
    whole = shelf.arena.free_bytes
    shelf.offer(encoded(shelf))
    with other_process(BORROWS, lender.address) as borrower:
        assert said(borrower) == "holds"
        gc.collect()
        assert shelf.arena.free_bytes < whole
        borrower.send_signal(signal.SIGKILL)
        eventually(lambda: shelf.arena.free_bytes == whole)


@pytest.mark.slow
def test_a_killed_lender_leaves_nothing_but_what_is_held() -> None:
    before = names_here()
    image = encoded(EmbeddingShelf(2**20))  # the same as the other process makes
    with other_process(LENDS) as process:
        address = said(process)
        assert names_here() - before == {"@" + address}, "no name but its socket's"
        inode, file = survives(Borrowed(address), process, image)
        eventually(lambda: names_here() - before == set())
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not any(inode == line.split()[4] for line in maps if "vitray-embeddings" in line)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def survives(borrowed: Borrowed, lends: subprocess.Popen[str], image: EncodedImage) -> tuple[str, int]:
    """What is held of a lender that is killed stays whole; the number of its memory, and the file that it came as."""
    held = hold(borrowed, image)
    lends.send_signal(signal.SIGKILL)
    eventually(lambda: not borrowed.alive)
    assert torch.equal(held.tensor(), image.unpack(width=WIDTH, merge_size=2))
    inode = str(os.fstat(borrowed.file).st_ino)
    assert any(inode == line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines())
    return inode, borrowed.file


def test_what_is_awaited_goes_before_what_is_cached() -> None:
    """An embedding that nobody but the cache refers to gives way; one that a reader holds stays where it is."""
    shelf = EmbeddingShelf(4 * PAGE_BYTES)
    replica = EncoderReplica.__new__(EncoderReplica)
    replica._cache = cache = EmbeddingCache(1 << 30)
    tokens = (PAGE_BYTES - HEADER_BYTES + PAGE_BYTES) // (2 * WIDTH)  # two pages with its header
    held = encoded(shelf, 1, tokens=tokens)
    cache.put(digest(1), held, held.num_bytes)
    other = encoded(shelf, 2, tokens=tokens)
    cache.put(digest(2), other, other.num_bytes)
    cache.get(digest(1))
    del other
    assert shelf.room(tokens, WIDTH, torch.bfloat16) is None
    first = replica._room(shelf, tokens, WIDTH, torch.bfloat16)
    assert first is not None
    assert cache.keys() == [digest(1)]
    assert replica._room(shelf, tokens, WIDTH, torch.bfloat16) is None, "all of it is in use"
    assert len(cache) == 0
    assert shelf.offer(held), "what is held has not moved"
