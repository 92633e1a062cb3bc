"""What the suite needs of the CUDA driver beyond cuda.core: streams by bare handle, ids, free memory, captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Capture", "capture", "create_stream", "destroy_stream", "handle_of", "memory_free", "ok", "stream_id"]

LEGACY = 1
PER_THREAD = 2
MODES = ("global", "thread_local", "relaxed")


def ok(result: tuple[Any, ...]) -> Any:
    """Give what a call of cuda.bindings gave, or raise what went wrong."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the driver says {error!r}")
    return values[0] if len(values) == 1 else tuple(values) if values else None


def handle_of(stream: Any) -> int:
    """Give the handle of a stream, however it is named."""
    return stream if isinstance(stream, int) else int(stream.__cuda_stream__()[1])


def create_stream() -> int:
    """Give the handle of a new non-blocking stream, which nobody owns."""
    from cuda.bindings import driver

    return int(ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))


def destroy_stream(handle: int) -> None:
    """Destroy a stream; its pending work still completes."""
    from cuda.bindings import driver

    ok(driver.cuStreamDestroy(handle))


def stream_id(stream: Any) -> int:
    """Give the driver's id of a stream that is not capturing."""
    from cuda.bindings import driver

    return int(ok(driver.cuStreamGetId(handle_of(stream))))


def sync_stream(stream: Any) -> None:
    """Wait for a stream."""
    from cuda.bindings import driver

    ok(driver.cuStreamSynchronize(handle_of(stream)))


def memory_free() -> int:
    """Give the bytes that the current device has left."""
    from cuda.bindings import driver

    return int(ok(driver.cuMemGetInfo())[0])


class Capture:
    """A capture under way, and the graph that came of it."""

    def __init__(self, stream: Any) -> None:
        self.stream = handle_of(stream)
        self.graph: Any = None
        self._ready: Any = None

    @property
    def is_valid(self) -> bool:
        """Whether the capture ended with a graph."""
        return self.graph is not None

    def prepare(self, stream: Any) -> None:
        """Load what the next `queue` launches: loading may wait for work that is stuck."""
        from cuda.bindings import driver

        self._ready = ok(driver.cuGraphInstantiate(self.graph, 0))
        ok(driver.cuGraphUpload(self._ready, handle_of(stream)))
        sync_stream(stream)

    def queue(self, stream: Any) -> None:
        """Queue the captured work once on `stream`. What is launched outlives the graph that it was made of."""
        from cuda.bindings import driver

        runnable, self._ready = self._ready, None
        if runnable is None:
            runnable = ok(driver.cuGraphInstantiate(self.graph, 0))
        try:
            ok(driver.cuGraphLaunch(runnable, handle_of(stream)))
        finally:
            ok(driver.cuGraphExecDestroy(runnable))

    def launch(self, stream: Any) -> None:
        """Run the captured work once on `stream`, and wait for it."""
        self.queue(stream)
        sync_stream(stream)

    def destroy(self) -> None:
        """Give the graph up."""
        from cuda.bindings import driver

        ok(driver.cuGraphDestroy(self.graph))
        self.graph = None


@contextmanager
def capture(stream: Any, mode: str = "global") -> Iterator[Capture]:
    """Capture what is queued on `stream` inside the block; afterwards `is_valid` tells whether the capture survived."""
    from cuda.bindings import driver

    modes = driver.CUstreamCaptureMode
    found = Capture(stream)
    ok(driver.cuStreamBeginCapture(found.stream, modes(MODES.index(mode))))
    try:
        yield found
    finally:
        error, graph = driver.cuStreamEndCapture(found.stream)
        if int(error) == 0 and int(graph) != 0:
            found.graph = graph
