"""Leaks: which live blocks are called leaks, how they are grouped, and which call sites grow."""

from __future__ import annotations

from typing import Any

import pytest

from streampool.leaks import Epochs, LeakClass, LeakPolicy, Leaks, find_leaks

STACKS = {1: [("/app/a.py", 1, "f")], 2: [("/app/a.py", 2, "g")], 3: [("/app/a.py", 1, "f")]}
MIB = 1 << 20


def block(serial: int, **changes: Any) -> dict[str, Any]:
    facts = {
        "serial": serial,
        "state": "live",
        "address": serial << 12,
        "size": 1000,
        "allocated_time": float(serial),
        "allocated_at": 1,
        "owner": "raw",
        "tag": "",
    }
    return facts | changes


def leaks(*blocks: dict[str, Any], epochs: Epochs | None = None) -> Leaks:
    return find_leaks(blocks, resolve=STACKS.__getitem__, epochs=epochs)


def test_a_raw_block_that_was_never_freed_is_lost() -> None:
    (leak,) = leaks(block(1))
    assert leak.leak_class is LeakClass.LOST
    assert (leak.bytes, leak.blocks) == (1000, 1)
    assert str(leak) == "lost: 1,000 bytes in 1 block, allocated raw and never freed"
    assert leak.summary == "lost leak /app/a.py:1 in f"


def test_a_block_that_an_object_owns_is_held() -> None:
    (leak,) = leaks(block(1, owner="buffer"))
    assert leak.leak_class is LeakClass.HELD


def test_without_an_owner_in_the_facts_the_way_of_allocation_decides() -> None:
    bare = {k: v for k, v in block(1).items() if k != "owner"}
    assert leaks(bare | {"raw": True})[0].leak_class is LeakClass.LOST
    assert leaks(bare | {"raw": False})[0].leak_class is LeakClass.HELD


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "quarantined"},
        {"state": "freed"},
        {"state": "released"},
        {"owner": "released"},
        {"exported": True},
        {"serial": 0},
    ],
    ids=str,
)
def test_pending_quarantined_exported_and_untracked_blocks_are_no_leaks_kokkos_1559(changes: dict[str, Any]) -> None:
    # opencv/opencv#8725, kokkos/kokkos#1559: leak reports that list what the library itself keeps.
    assert len(leaks(block(1) | changes)) == 0


def test_one_leak_among_ten_thousand_blocks_is_one_entry_opencv_8725() -> None:
    found = leaks(*(block(n, owner="buffer") for n in range(1, 10_000)), block(10_000, allocated_at=2))
    assert [(leak.leak_class, leak.blocks) for leak in found] == [(LeakClass.LOST, 1), (LeakClass.HELD, 9_999)]
    assert [leak.blocks for leak in found.counted()] == [1]


def test_equal_stacks_are_one_entry_with_their_sizes_and_times() -> None:
    (leak,) = leaks(block(3, size=10), block(1, size=500, tag="b"), block(2, size=70, allocated_at=3, tag="a"))
    assert (leak.bytes, leak.blocks, leak.smallest, leak.largest) == (580, 3, 10, 500)
    assert (leak.first_time, leak.last_time) == (1.0, 3.0)
    assert leak.serials == (1, 2, 3)
    assert leak.tags == ("b", "a")
    assert "580 bytes in 3 blocks, 10 to 500 bytes each" in str(leak)


def test_without_stacks_blocks_are_grouped_by_tag() -> None:
    found = leaks(
        block(1, allocated_at=0, tag="x"), block(2, allocated_at=0, tag="x"), block(3, allocated_at=0, tag="y")
    )
    assert [(leak.tags, leak.blocks) for leak in found] == [(("x",), 2), (("y",), 1)]


def test_surest_class_first_then_most_bytes() -> None:
    found = leaks(block(1, owner="buffer", size=9999), block(2, size=1), block(3, size=5, allocated_at=2))
    assert [(leak.leak_class, leak.bytes) for leak in found] == [("lost", 5), ("lost", 1), ("held", 9999)]
    assert (found.lost.bytes, found.held.bytes, found.blocks) == (6, 9999, 3)


@pytest.mark.parametrize(
    ("policy", "counted"), [("definite", {"lost", "growing"}), ("all", set(LeakClass)), ("off", set())]
)
def test_the_policy_says_which_classes_count(policy: str, counted: set[str]) -> None:
    assert {c for c in LeakClass if LeakPolicy(policy).counts(c)} == counted


# -- growing ----------------------------------------------------------------------------------------------------------
def observe(sizes: list[int], *, min_bytes: int = 1, needed: int = 4) -> Epochs:
    epochs = Epochs(needed=needed, min_bytes=min_bytes)
    for size in sizes:
        epochs.observe([block(1, owner="buffer", size=size)] if size else [])
    return epochs


@pytest.mark.parametrize(
    ("sizes", "grows"),
    [
        ([1, 2, 3, 4, 5], True),
        ([1, 2, 3, 4], False),
        ([5, 5, 6, 7, 8, 9], True),
        ([1, 2, 3, 4, 5, 5], False),
        ([1, 2, 3, 2, 3, 4, 5], False),
        ([1, 2, 3, 2, 3, 4, 5, 6], True),
        ([0, 1, 2, 3, 4], True),
        ([5, 6, 7, 8, 9, 0], False),
        ([], False),
    ],
    ids=str,
)
def test_a_site_grows_when_its_live_bytes_rose_in_each_of_the_last_four_epochs(sizes: list[int], grows: bool) -> None:
    assert bool(observe(sizes).growing()) is grows


def test_growth_below_the_minimum_is_no_leak() -> None:
    assert not observe([1, 2, 3, 4, 5], min_bytes=MIB).growing()
    assert observe([0, MIB, 2 * MIB, 3 * MIB, 4 * MIB], min_bytes=MIB).growing()


def test_growing_blocks_are_a_class_of_their_own_and_count() -> None:
    epochs = observe([10, 20, 30, 40, 50])
    found = leaks(block(1, owner="buffer", size=50), block(2, owner="buffer", allocated_at=2), epochs=epochs)
    assert [(leak.leak_class, leak.growth) for leak in found] == [("growing", (10, 20, 30, 40, 50)), ("held", ())]
    assert len(found.counted()) == 1


def test_a_line_grows_with_all_its_blocks_whichever_stack_numbers_it_has() -> None:
    """Python 3.13 is at another instruction of a line in its first call: that block is of the growing line too."""
    epochs = observe([10, 20, 30, 40, 50])
    (leak,) = leaks(block(1, owner="buffer", allocated_at=3), block(2, owner="buffer"), epochs=epochs)
    assert (leak.leak_class, leak.blocks, leak.growth) == ("growing", 2, (10, 20, 30, 40, 50))


def test_a_lost_block_of_a_growing_site_is_lost() -> None:
    found = leaks(block(1, size=50), epochs=observe([10, 20, 30, 40, 50]))
    assert [leak.leak_class for leak in found] == [LeakClass.LOST]


def test_sites_grow_each_for_itself() -> None:
    epochs = Epochs(min_bytes=1)
    for n in range(1, 7):
        epochs.observe([block(1, size=n, allocated_at=1), block(2, size=7 - n, allocated_at=2)])
    assert list(epochs.growing()) == [1]
