"""Debug mode from Python: scopes in a fault's window, what was never written, what the quarantine keeps."""

from __future__ import annotations

import threading

import pytest

import streampool as sp
from streampool.faults import Fault, FaultKind
from streampool.report import Report


def scopes_of(pool: sp.Pool) -> tuple[str, ...]:
    (fault,) = pool.faults()
    return fault.scopes


def write_behind(stream: sp.sim.Stream, block: sp.Buffer) -> None:
    stream.launch(lambda out: out.fill(0x41), writes=[(block.handle, block.size + 1)])
    stream.sync()


# -- scopes -----------------------------------------------------------------------------------------------------------
def test_a_fault_names_the_scopes_that_were_open_in_its_window(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug") as pool:
        block = pool.allocate(1000, stream=stream)
        with sp.scope("load"):
            pool.check()
        with sp.scope("step 1"), sp.scope("decode"):
            write_behind(stream, block)
        pool.check()
        with sp.scope("step 2"):
            pass
        assert scopes_of(pool) == ("load", "step 1", "decode")


def test_a_scope_left_by_an_exception_another_thread_or_out_of_order_is_left(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug") as pool:
        block = pool.allocate(1000, stream=stream)
        with pytest.raises(ZeroDivisionError), sp.scope("failing"):
            _ = 1 / 0
        first, second = sp.scope("first"), sp.scope("second")
        first.__enter__()
        second.__enter__()
        thread = threading.Thread(target=first.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        pool.check()
        write_behind(stream, block)
        pool.check()
        second.__exit__(None, None, None)
        assert scopes_of(pool) == ("second",)


def test_a_scope_may_be_entered_again_inside_itself() -> None:
    again = sp.scope("again")
    with again, again:
        assert repr(again) == "<streampool.scope 'again'>"


def test_a_long_name_is_cut_between_characters(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug") as pool:
        block = pool.allocate(1000, stream=stream)
        with sp.scope("x" + "ä" * 200), sp.scope(""):
            write_behind(stream, block)
        pool.check()
        assert scopes_of(pool) == ("x" + "ä" * 99, "")


def test_a_scope_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match="a scope's name is a str, not int"):
        sp.scope(5)  # type: ignore[arg-type]


def test_the_report_shows_the_scopes_of_the_window(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug") as pool:
        block = pool.allocate(1000, stream=stream)
        with sp.scope("decode"):
            write_behind(stream, block)
        pool.check()
        (fault,) = pool.faults()
    report = Report(faults=(fault,))
    assert "open in the window: decode" in report.to_text()
    assert Report.from_json(report.to_json()).faults == (fault,)


def test_check_every_narrows_the_window_to_so_many_frees(device: sp.sim.Device) -> None:
    """Guards of a block are judged at the batch after its free: with 1, at that free."""
    stream = device.create_stream()
    found = {}
    for every in (1, 4):
        with sp.Pool(device, mode="debug", check_every=every, check_interval=1e9) as pool:
            pool.register_stream(stream)
            for n in range(4):
                block = pool.allocate(1000, stream=stream)
                if n == 0:
                    write_behind(stream, block)
                block.close(stream)
                faults = pool.faults()
                if faults:
                    found[every] = n
    assert found == {1: 0, 4: 3}


# -- what was never written -------------------------------------------------------------------------------------------
def test_what_was_never_written_is_counted_by_call_site(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug", count_untouched=True) as pool:
        for _ in range(2):
            block = pool.allocate(100_000, stream=stream)
            stream.launch(lambda out: out.fill(1), writes=[(block.handle, 40_000)])
            stream.sync()
            block.close(stream)
        pool.check()
        (site,) = pool.usage()
        assert (site.blocks, site.bytes, site.untouched) == (2, 200_000, 120_000)
        assert str(site).startswith("allocated 195.31 KiB in 2 blocks, wrote 78.12 KiB (40 %) at ")
        assert site.allocated_at[0].function == "test_what_was_never_written_is_counted_by_call_site"
        assert pool.debug_totals()["untouched_bytes"] == 120_000
        assert pool.faults() == []


def test_usage_is_empty_where_nothing_counts_it(device: sp.sim.Device) -> None:
    with sp.Pool(device, mode="debug") as pool:
        pool.allocate(10).close()
        pool.check()
        assert pool.usage() == []


# -- quarantine -------------------------------------------------------------------------------------------------------
def test_quarantine_is_bounded_by_count_and_by_age(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug", check_every=1, quarantine_blocks=2, quarantine_age=60) as pool:
        pool.register_stream(stream)

        def free_one() -> int:
            pool.allocate(1000, stream=stream).close(stream)
            pool.check()
            return int(pool.debug_totals()["quarantined_blocks"])

        assert [free_one() for _ in range(4)] == [1, 2, 2, 2]
        sp.sim.clock.advance(61)
        assert free_one() == 1  # the others were there for longer


@pytest.mark.parametrize("size", [4096, 1 << 20, 30 << 20])
@pytest.mark.parametrize("named", [True, False])
def test_blocks_dropped_on_the_default_stream_leave_the_quarantine(
    device: sp.sim.Device, named: bool, size: int
) -> None:
    """A tester's program: buffers that went out of scope stayed quarantined for good, gigabytes of them."""
    cap = 16 << 20
    with sp.Pool(device, mode="debug", quarantine_bytes=cap) as pool:
        most = 0
        for i in range(1000 if size < 30 << 20 else 60):
            block = pool.allocate(size)
            if named:
                block.close(device.default_stream)
            else:
                block.close()
            del block
            if i % 50 == 49:
                device.sync()
                most = max(most, pool.stats().quarantined)
        # Fences come by 64 frees or 32 MiB, and batches of checks as well.
        assert most <= cap + 2 * 64 * min(size, 1 << 20) + 8 * max(size, 1 << 20) + (64 << 20)


def test_quarantine_is_given_up_before_an_out_of_memory_error(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug", limit="32MiB", quarantine_bytes="64MiB") as pool:
        pool.register_stream(stream)
        for _ in range(16):
            pool.allocate(8 << 20, stream=stream).close(stream)
        assert pool.stats().out_of_memory == 0
        assert pool.stats().paths["quarantine"] > 0
        assert pool.faults() == []


def test_a_fault_found_while_quarantine_is_given_up_is_not_lost(device: sp.sim.Device) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug", limit="32MiB", quarantine_bytes="64MiB") as pool:
        pool.register_stream(stream)
        block = pool.allocate(8 << 20, stream=stream)
        address = block.handle
        block.close(stream)
        pool.check()
        stream.launch(lambda out: out.fill(7), writes=[(address + 5, 2)])
        stream.sync()
        for _ in range(8):
            pool.allocate(8 << 20, stream=stream).close(stream)
        (fault,) = pool.faults()
        assert fault.kind is FaultKind.WRITE_AFTER_FREE
        assert (fault.address, fault.last) == (address + 5, address + 6)
        assert isinstance(fault, Fault)


@pytest.mark.parametrize("guard", [0, 1, 3, 17, 256])
@pytest.mark.parametrize("size", [1, 255, 256, 257, 1013])
def test_guards_of_any_size_are_exact_to_the_byte_from_the_requested_size(
    device: sp.sim.Device, guard: int, size: int
) -> None:
    stream = device.create_stream()
    with sp.Pool(device, mode="debug", guard_bytes=guard) as pool:
        block = pool.allocate(size, stream=stream)
        facts = block.facts()
        first, end = facts["begin"], facts["begin"] + facts["reserved"]
        assert block.handle - first >= guard
        assert end - block.handle - size >= guard
        assert block.handle % 256 == 0
        # Every byte outside the body is guard: the nearest and the farthest of each side.
        for at in {block.handle + size, end - 1, block.handle - 1, first}:
            if first <= at < block.handle or block.handle + size <= at < end:
                stream.launch(lambda out: out.fill(0), writes=[(at, 1)])
                stream.sync()
                pool.check()
                (fault,) = pool.faults()
                assert (fault.address, fault.last) == (at, at)
                assert fault.kind is (FaultKind.UNDERRUN if at < block.handle else FaultKind.OVERRUN)
