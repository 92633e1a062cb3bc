"""Streams of a second GPU that use a block: kept while their work runs, reused after it. Runs where there are two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import streampool as sp

MIB = 1 << 20
SECONDS = 0.7

pytestmark = pytest.mark.two_gpus


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="torch makes the peer's work")
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPU here: a peer needs two")
    return torch


@pytest.fixture
def far(torch: Any) -> Iterator[Any]:
    torch.zeros(1, device="cuda:1")
    stream = torch.cuda.Stream(device=1)
    yield stream
    stream.synchronize()


def used_by(far: Any, torch: Any, pool: sp.Pool, stream: Any) -> int:
    """Free a block that work on the far stream may use for a while yet. Gives its address."""
    block = pool.allocate(4 * MIB, stream=stream)
    address = int(block.handle)
    with torch.cuda.device(1), torch.cuda.stream(far):
        torch.cuda._sleep(int(SECONDS * 1.5e9))
    block.record_stream(far.cuda_stream)
    block.close(stream)
    assert not far.query(), "the work ended too early to show anything"
    return address


@pytest.mark.parametrize("registered", [False, True])
def test_a_block_under_a_peers_work_is_kept_and_found_again(torch: Any, far: Any, registered: bool) -> None:
    device = sp.Device("cuda:0")
    s = device.create_stream()
    pool = sp.Pool(device, limit="64MiB")
    pool.register_stream(s)
    if registered:
        pool.register_stream(far.cuda_stream)
    used = used_by(far, torch, pool, s)
    other = pool.allocate(4 * MIB, stream=s)
    assert int(other.handle) != used
    assert not far.query()
    if not registered:
        other.record_stream(far.cuda_stream)  # names the stream: what it owes is fenced
    far.synchronize()
    reserved = pool.stats()["reserved"]
    again = pool.allocate(4 * MIB, stream=s)
    assert pool.stats()["reserved"] == reserved
    with pytest.raises(sp.StreamError, match="another device"):
        pool.allocate(4096, stream=far.cuda_stream)
    for block in (other, again):
        block.close(s)
    if registered:
        pool.forget_stream(far.cuda_stream)
    pool.close()
    assert pool.audit() == ""


def test_a_peers_stream_that_nobody_names_again_is_covered_by_an_event_of_its_context(torch: Any, far: Any) -> None:
    device = sp.Device("cuda:0")
    s = device.create_stream()
    pool = sp.Pool(device, limit="6MiB", wait_timeout=20)
    pool.register_stream(s)
    used = used_by(far, torch, pool, s)
    block = pool.allocate(4 * MIB, stream=s)  # waits: there is no room for another
    assert far.query(), "handed out under a peer's work"
    assert int(block.handle) == used
    assert pool.stats()["context_events"] >= 1
    block.close(s)
    pool.close()
