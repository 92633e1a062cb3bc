"""Graphs of the simulated device: captured work, launched any number of times."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from streampool._core import sim as _sim
    from streampool.sim import Stream

__all__ = ["Graph"]


class Graph:
    """What a capture recorded; `Stream.end_capture` gives it. As a context manager it closes on exit.

    A graph stays until it is closed, or nobody holds it any more, and what was launched of it is done.
    """

    def __init__(self, graph: _sim.Graph) -> None:
        self._graph = graph
        self._closed = False

    def launch(self, stream: Stream) -> None:
        """Queue all of the captured work behind what is queued on `stream`, and in front of what is queued next.

        Launches of one graph follow each other, on whichever streams.

        Raises
        ------
        ValueError
            The graph is closed.
        TypeError
            `stream` is no stream of the simulated device.
        """
        from streampool import sim

        self._graph.launch(sim._must_be(sim.Stream, "stream", stream)._open())

    def close(self) -> None:
        """Give the graph up. What was launched still runs. Again: nothing happens."""
        self._closed = True
        self._graph.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Graph{' closed' if self._closed else ''}>"
