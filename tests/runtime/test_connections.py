"""Connections that are another's to close: those with a host that is gone are ended, and no others."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fastpipe.runtime.connections import Connections, connections_with, descriptors
from tests.promptly import promptly

SOON = 3.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with one, other:
        yield one, other


def of(connection: socket.socket) -> Connections:
    return Connections({connection.fileno(): os.fstat(connection.fileno()).st_ino})


def cut(connection: socket.socket) -> None:
    """The kernel drops whatever comes."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: accept 0 bytes
    connection.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(nothing)))


def has_ended(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def seconds_to_end(connection: socket.socket, connections: Connections) -> float:
    start = time.monotonic()
    while not has_ended(connection) and time.monotonic() < start + SOON:
        time.sleep(0.05)
        connections.end_silent()
    return time.monotonic() - start


def test_one_with_a_host_that_is_gone_is_ended(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    connections = of(one).ask()
    for end in pair:
        cut(end)
    seconds = seconds_to_end(one, connections)
    assert has_ended(one) and seconds > 1.0 and promptly(seconds)
    connections.end_silent()  # again


@pytest.mark.parametrize("outstanding", [False, True])
def test_one_with_a_process_that_says_and_reads_nothing_goes_on(
    pair: tuple[socket.socket, socket.socket], outstanding: bool
) -> None:
    one, other = pair
    connections = of(one).ask()
    if outstanding:
        one.sendall(b"x" * 1000)
    assert seconds_to_end(one, connections) >= SOON
    other.sendall(b"y")
    assert one.recv(1) == b"y"


def test_what_is_sent_to_a_host_that_is_gone_ends_it_by_itself(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    of(one).end_after(0.5)
    for end in pair:
        cut(end)
    one.sendall(b"x")
    seconds = seconds_to_end(one, Connections({}))
    assert has_ended(one) and seconds > 0.4 and promptly(seconds)


def test_another_one_under_the_same_number_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    wrong = Connections({one.fileno(): os.fstat(other.fileno()).st_ino}).ask()
    assert not one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for end in pair:
        cut(end)
    assert seconds_to_end(one, wrong) >= SOON


def test_a_process_knows_its_connections_with_a_store() -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    clone = store.clone()
    found = connections_with(dist.PrefixStore("part", store))
    assert len(found._found) == 2, "its own, and the clone's"
    assert set(found._found.items()) <= set(descriptors().items())
    assert not connections_with(dist.HashStore())._found
    del clone
