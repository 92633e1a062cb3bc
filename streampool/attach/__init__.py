"""Other libraries' device memory from streampool: PyTorch, CuPy, Numba, RMM, cuda.core.

>>> sp.install("cupy")                     # before CuPy's first allocation
>>> sp.installed()
(Installed(library='cupy', version='14.2.0', ...),)

``streampool run`` does this by itself for what the program imports. Nothing here imports a library unasked.

    _table.py     the libraries: names, modules, the oldest version that is served
    _hooks.py     libraries are served when they are imported: streampool run's way in
    _pools.py     one pool a device for each library, made when it is first needed
    _coverage.py  how much of a library's memory came from here, and what this process holds beside it
    _children.py  Python programs that a watched program starts; _site/ is how they learn of it
    torch.py, cupy.py, numba.py, rmm.py, cuda_core.py   the adapters, one a library
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from streampool import session
from streampool.attach._pools import Pools
from streampool.attach._table import LIBRARIES, Library, find, problem_of_version, version_of
from streampool.errors import StreamPoolError

if TYPE_CHECKING:
    from streampool.attach._coverage import Usage
    from streampool.pool import Pool

__all__ = ["AttachError", "Installed", "install", "installed", "uninstall"]


class AttachError(StreamPoolError):
    """A library cannot be served, or not any more: says which, why, and what to do."""


class Adapter(Protocol):
    """What serves one library."""

    notes: list[str]  # what of the library does not work, or is not seen, while it is served

    def install(self) -> None:
        """Take over. Raises ``AttachError``."""

    def uninstall(self) -> None:
        """Give the library its own allocator back. Raises ``AttachError`` where it cannot be."""

    def usage(self) -> Usage:
        """Say how much of the library's memory came from here."""


@runtime_checkable
class Lasting(Adapter, Protocol):
    """What serves a library that keeps its allocator."""

    def serve_from(self, pools: Pools) -> None:
        """Go on with other pools. Raises ``AttachError`` where there is memory of the present ones."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A library that is served."""

    library: str
    version: str
    pools: tuple[Pool, ...] = ()  # those that were needed so far
    notes: tuple[str, ...] = ()  # what does not work or is not seen; docs/libraries has the whole list
    adapter: Any = field(default=None, repr=False, compare=False)


@dataclass(slots=True)
class _Served:
    library: Library
    version: str
    pools: Pools
    adapter: Adapter
    unasked: bool = False  # by `streampool run`: the program may still say how


_served: dict[str, _Served] = {}
_asked: set[str] = set()
"""Libraries that the program itself is installing: what waits for their import leaves them alone."""


def install(library: str, pool: Pool | None = None, **options: Any) -> Installed:
    """Serve a library's device memory from here on.

    Imports the library. Call it before the library's first allocation. Where ``streampool run`` serves the library
    already, it goes on with this pool and these options.

    Parameters
    ----------
    library
        ``"torch"``, ``"cupy"``, ``"numba"``, ``"rmm"`` or ``"cuda.core"``.
    pool
        The pool for its device; other devices, and all where it is None, get pools of their own when they are first
        needed.
    **options
        Options of these pools, as ``sp.Pool`` takes them: ``mode="debug"``, ``limit="80%"``.

    Raises
    ------
    AttachError
        The library is not installed, too old, in use already, or served already.
    ValueError, TypeError
        No such library; an option that there is not.
    """
    row = find(library)
    served = _served.get(row.name)
    if served is not None and not served.unasked:
        raise AttachError(f"{row.title} is served already; uninstall({row.name!r}) first")
    as_it_is = pool is None and not options
    pools = Pools(row.name, pool, options)
    if served is not None:
        if not as_it_is:
            return _replace(served, pools)
        served.unasked = False
        return _describe(served)
    _asked.add(row.name)
    try:
        importlib.import_module(row.module)
        return _take_over(row, pools)
    except ImportError as error:
        raise AttachError(f"{row.title} cannot be imported ({error}): install it first") from error
    finally:
        _asked.discard(row.name)


def _replace(served: _Served, pools: Pools) -> Installed:
    row = served.library
    session.look()
    if any(made.stats().live_blocks for made in served.pools.made()):
        raise AttachError(
            f"{row.title} has memory from `streampool run` already: call install({row.name!r}, ...) before its first "
            "allocation, or give the options to `streampool run` (STREAMPOOL_OPTIONS)"
        )
    if isinstance(served.adapter, Lasting):
        served.adapter.serve_from(pools)
        _served[row.name] = _Served(row, served.version, pools, served.adapter)
        return _describe(_served[row.name])
    served.adapter.uninstall()
    del _served[row.name]
    try:
        return _take_over(row, pools)
    except BaseException:
        with contextlib.suppress(AttachError):
            served.adapter.install()
            _served[row.name] = served
        raise


def _take_over(row: Library, pools: Pools, *, unasked: bool = False) -> Installed:
    version = version_of(row)
    problem = problem_of_version(row, version)
    if problem is not None:
        raise AttachError(problem)
    adapter: Adapter = importlib.import_module(row.adapter).make(pools)
    adapter.install()
    _served[row.name] = _Served(row, version, pools, adapter, unasked)
    return _describe(_served[row.name])


def uninstall(library: str) -> None:
    """Give a library its own allocator back. Blocks that it holds stay valid until it frees them.

    Raises
    ------
    AttachError
        It is not served, or it cannot change its allocator any more.
    ValueError
        No such library.
    """
    row = find(library)
    served = _served.get(row.name)
    if served is None:
        raise AttachError(f"{row.title} is not served: there is nothing to uninstall")
    served.adapter.uninstall()
    del _served[row.name]


def installed() -> tuple[Installed, ...]:
    """Give the libraries that are served, in the order in which they were installed."""
    session.look()
    return tuple(_describe(served) for served in _served.values())


def _describe(served: _Served) -> Installed:
    pools = tuple(served.pools.made())
    return Installed(served.library.name, served.version, pools, tuple(served.adapter.notes), served.adapter)


def known() -> tuple[str, ...]:
    """Give the names of all libraries that can be served."""
    return tuple(row.name for row in LIBRARIES)
