"""A block crosses streams: one produces it, another consumes it, and the producer frees it early.

Without a word to the pool the next block gets the same bytes while the consumer still reads them. With `record_stream`
it does not.

    python examples/multi_stream_reuse.py --device sim

On the simulated device the consumer is held back by a gate, and the happens-before checker shows the race with
both stacks. On a GPU the program shows the same by addresses: whether the bytes were handed out again.

In debug mode there is no early reuse to show: freed memory is kept back until it has been checked. The program says so.
"""

from __future__ import annotations

import argparse
from typing import Any

import streampool as sp

SIZE = 64 << 20  # bytes
ROUNDS = 200  # copies that keep a GPU busy for a few milliseconds


def hand_over(device: Any, pool: sp.Pool, producer: Any, consumer: Any, *, declared: bool) -> bool:
    """Pass a block from `producer` to `consumer`; True when its bytes were handed out again too early."""
    result = pool.allocate(SIZE, stream=consumer)
    batch = pool.allocate(SIZE, stream=producer)
    produce(device, producer, batch, 1)
    consumer.wait(producer.record())  # the consumer starts after the producer wrote ...
    gate = hold_back(device, consumer)
    consume(device, consumer, batch, result)
    consumed = consumer.record()
    if declared:
        batch.record_stream(consumer)
    address = batch.handle
    batch.close(producer)  # ... but nothing says that it has finished

    following = pool.allocate(SIZE, stream=producer)
    too_early = not consumed.is_done and address - SIZE < following.handle < address + SIZE
    produce(device, producer, following, 2)

    if gate is not None:
        gate.open()
    device.sync()
    following.close(producer)
    result.close(consumer)
    return too_early


def produce(device: Any, stream: Any, block: sp.Buffer, value: int) -> None:
    """Queue work that writes a block."""
    if isinstance(device, sp.sim.Device):
        stream.launch(lambda out: out.fill(value), writes=[block], label="produce")
    else:
        block.fill(value, stream=stream)


def consume(device: Any, stream: Any, block: sp.Buffer, result: sp.Buffer) -> None:
    """Queue work that reads a block and writes another."""
    if isinstance(device, sp.sim.Device):
        stream.launch(lambda x, out: out.put(range(16), x[:16]), reads=[block], writes=[result], label="consume")
    else:
        for _ in range(ROUNDS):
            result.copy_from(block, stream=stream)


def hold_back(device: Any, stream: Any) -> Any:
    """Keep the simulated stream from going on until the gate opens. A GPU is left to its own pace."""
    if not isinstance(device, sp.sim.Device):
        return None
    gate = sp.sim.Gate()
    stream.launch(gate=gate)
    return gate


def show_races(device: Any) -> int:
    """Print what the happens-before checker found since the last call, and give how many."""
    if not isinstance(device, sp.sim.Device):
        return 0
    races = device.races()
    for race in races:
        print(race)
    return len(races)


def main() -> None:
    parser = argparse.ArgumentParser(description="A block crosses streams, unsafe and then safe.")
    parser.add_argument("--device", default="auto", help="auto, cuda or sim")
    device = sp.Device(parser.parse_args().device)
    producer, consumer = device.create_stream(), device.create_stream()

    with sp.Pool(device, name="pipeline") as pool:
        if pool.mode in (sp.Mode.DEBUG, sp.Mode.PARANOID):
            print(
                f"This pool is in {pool.mode} mode, which keeps freed memory back until it has been checked: the bytes "
                "are not handed out again early. A race is seen only where the pool fills the freed block while it is "
                "still read. Run me in production mode to see both."
            )
        for stream in (producer, consumer):
            pool.register_stream(stream)
        for declared in (False, True):
            title = "with record_stream" if declared else "without record_stream"
            early = hand_over(device, pool, producer, consumer, declared=declared)
            races = show_races(device)
            print(f"{title}: bytes handed out again too early: {'yes' if early else 'no'}; races seen: {races}")
        for stream in (producer, consumer):
            pool.forget_stream(stream)


if __name__ == "__main__":
    main()
