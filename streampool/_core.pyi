"""The native core. Everything here is wrapped by the public modules of the package; import those."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, SupportsIndex, overload

from streampool import _core_sim

sim = _core_sim  # the submodule

# -- errors: created here, re-exported by streampool.errors ---------------------------------------------------------
class StreamPoolError(Exception): ...

class OutOfMemoryError(StreamPoolError, MemoryError):
    """The fields of R12: request, alignment, stream and capture (one of them 0), device, pool, kind, limit, reserved, in_use, pending, cached, quarantined,
    largest_free, device_free, device_total (bytes; None where a query failed), reason ('driver', 'limit', 'fragmentation', 'pending',
    'capture'), driver_error (text), holders (list of (bytes, blocks, stack id); estimates where sample_bytes is not 0), sample_bytes (one
    call stack is kept in so many bytes; 0: holders are exact)."""

    fields: dict[str, Any]

class InvalidFreeError(StreamPoolError): ...
class DoubleFreeError(InvalidFreeError): ...
class ForeignFreeError(InvalidFreeError): ...
class InteriorFreeError(InvalidFreeError): ...
class WrongPoolError(InvalidFreeError): ...
class SizeMismatchError(InvalidFreeError): ...
class TrampledRecordError(InvalidFreeError): ...
class StreamError(StreamPoolError): ...
class CaptureError(StreamError): ...
class DriverError(StreamPoolError): ...
class DriverNotFoundError(DriverError): ...  # no libcuda, or no device
class PoolClosedError(StreamPoolError): ...
class ForkedProcessError(StreamPoolError): ...

class FaultError(StreamPoolError):  # on_fault=raise
    faults: list[Any]  # of streampool.faults.Fault; set by the Python layer

# Nonsense arguments raise ValueError and TypeError, as everywhere in Python.

# -- devices ---------------------------------------------------------------------------------------------------------
class Driver:
    """One device and its context."""

    @property
    def name(self) -> str: ...  # "cuda:0", "sim:0"
    @property
    def ordinal(self) -> int: ...
    @property
    def simulated(self) -> bool: ...
    @property
    def version(self) -> str: ...
    @property
    def handle(self) -> int: ...  # opaque; equal handles are the same device
    def capabilities(self) -> dict[str, Any]: ...
    def calls(self) -> dict[str, int]: ...
    def now(self) -> float: ...
    def memory_info(self) -> tuple[int, int]: ...  # free, total bytes

def open_device(name: str) -> Driver:
    """Open 'cuda:N', 'sim:N', 'cuda', 'sim' or 'auto'. Raises DriverNotFoundError, DriverError, ValueError."""

# -- options: one table, native/src/pool/options.cpp ------------------------------------------------------------------
class Option:
    name: str
    type: str  # "bool", "int", "size" (bytes, "2GiB" accepted), "seconds", "enum", "text"
    default: str
    choices: list[str]
    help: str

def option_table() -> list[Option]: ...
def presets() -> dict[str, dict[str, str]]: ...  # mode -> option -> value
def resolve_options(arguments: dict[str, object], environment: str | None) -> dict[str, str]:
    """Arguments over STREAMPOOL_OPTIONS ('name=value:name=value') over the mode's preset over defaults; every option, as text.
    Raises ValueError that names the option, the value and what is allowed."""

def parse_size(size: str | SupportsIndex | float) -> int:
    """'2GiB', '512 MB', 4096 -> bytes. Raises ValueError, TypeError."""

# -- the pool ----------------------------------------------------------------------------------------------------------
# A `stream` argument is: None (the current stream: see streams.py), an int handle, or an object with __cuda_stream__();
# to record, register or forget one is to name it: no None. SupportsIndex: an int, or a NumPy integer; a bool is refused.
class Buffer:
    """One block. Made by Pool.allocate only."""

    @property
    def handle(self) -> int: ...  # the address; 0 when closed
    ptr = handle
    @property
    def size(self) -> int: ...  # requested bytes
    @property
    def is_closed(self) -> bool: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def kind(self) -> str: ...
    @property
    def device_id(self) -> int: ...
    @property
    def is_device_accessible(self) -> bool: ...
    @property
    def is_host_accessible(self) -> bool: ...  # True for pinned, managed and everything simulated
    @property
    def stream(self) -> object: ...  # what it was allocated on, as the caller gave it
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def record_stream(self, stream: object) -> None: ...
    def record_event(self, event: object) -> None: ...
    def close(self, stream: object = None) -> None: ...  # explicit free on `stream`; None: implicit release
    def fill(self, value: SupportsIndex, *, stream: object = None) -> None: ...
    def copy_to(self, dst: object, *, stream: object = None) -> None: ...  # Buffer, or a writable buffer (host)
    def copy_from(self, src: object, *, stream: object = None) -> None: ...
    def numpy(self, dtype: object = "uint8") -> Any: ...  # a view; host-accessible only; keeps the block alive
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __array__(self, dtype: object = None, copy: bool | None = None) -> Any: ...  # for NumPy's errors
    def facts(self) -> dict[str, Any]: ...
    def __dlpack__(
        self,
        *,
        stream: SupportsIndex | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

class Pool:
    @overload
    def __init__(self, *, torch_device: int, options: dict[str, str]) -> None: ...  # the one that serves PyTorch there
    @overload
    def __init__(self, driver: Driver, *, kind: str, name: str, options: dict[str, str]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def driver(self) -> Driver: ...
    @property
    def options(self) -> dict[str, str]: ...
    @property
    def is_closed(self) -> bool: ...
    def allocate(
        self,
        size: SupportsIndex,
        *,
        stream: object = None,
        alignment: SupportsIndex = 256,
        stream_ordered: bool | None = None,
        tag: str | None = None,
    ) -> Buffer: ...
    def allocate_raw(self, size: SupportsIndex, *, stream: object = None, alignment: SupportsIndex = 256) -> int: ...
    def allocate_owned(self, size: SupportsIndex, *, stream: object = None, alignment: SupportsIndex = 256) -> int: ...
    def free_raw(self, ptr: SupportsIndex, *, stream: object = None) -> None: ...
    def free_raw_sized(self, ptr: SupportsIndex, size: SupportsIndex, *, stream: object = None) -> None: ...
    def record_stream_raw(self, ptr: SupportsIndex, stream: object) -> None: ...
    def record_event_raw(self, ptr: SupportsIndex, event: object) -> None: ...
    def register_stream(self, stream: object) -> None: ...
    def forget_stream(self, stream: object) -> None: ...
    def begin_capturing(self, stream: object) -> None: ...
    def end_capturing(self, stream: object) -> None: ...
    def reserve(self, size: SupportsIndex | str) -> int: ...
    def trim(
        self, keep_bytes: SupportsIndex | str = 0
    ) -> dict[str, int]: ...  # released, pinned_by_live, pending, reserved
    def stats(
        self,
    ) -> dict[
        str, Any
    ]: ...  # in_use, rounding, guards, quarantined, pending, cached, reserved, *_peak, counts, reuse paths, …
    def reset_peaks(self) -> None: ...
    def check(
        self, timeout: float = 10.0
    ) -> dict[str, Any]: ...  # checked_blocks, checked_bytes, faults, not_checked: list of facts
    def take_faults(self) -> list[dict[str, Any]]: ...  # fault.hpp, field by field
    def holders(self, by_tag: bool = False) -> list[Held]: ...
    def free_pieces(
        self, most: int
    ) -> list[tuple[int, str]]: ...  # bytes, "any_stream" | "own_stream" | "waiting"; largest first
    def live_blocks(
        self,
    ) -> list[dict[str, Any]]: ...  # facts of every live block (BlockFacts, plus owner: "raw" | "buffer" | "released")
    def debug_totals(self) -> dict[str, int]: ...
    def _usage(self) -> list[dict[str, int]]: ...  # allocated_at (a stack), blocks, bytes, untouched
    def audit(self) -> str: ...  # for tests: empty, or what does not hold
    def set_oom_callback(self, callback: Callable[[int], bool] | None) -> None: ...
    def close(self) -> None: ...

_oom_hook: Callable[[BaseException], None] | None  # told of each out-of-memory error before it is raised
_fault_hook: (
    Callable[[Pool], None] | None
)  # called before a call of a pool that has faults to tell (on_fault), and by a free that was refused

def set_current_stream_hook(hook: Callable[[bool], object] | None) -> None:
    """What a call means whose `stream` is None: asked whether the device is simulated; gives an int handle or a stream object."""

# -- other libraries: streampool.attach ---------------------------------------------------------------------------------
class UnorderedMemory:
    """Blocks of a pool for callers that know no streams: settled when handed out, freed after all that is queued."""

    def __init__(self, pool: Pool) -> None: ...
    def allocate(self, size: SupportsIndex) -> int: ...
    def free(self, ptr: SupportsIndex) -> None: ...

def torch_configure(family: str, name: str, options: dict[str, str]) -> None:
    """How PyTorch's pools are made from here on, on devices 'FAMILY:N'."""

def torch_give_pool(device: int, pool: Pool) -> bool:
    """Serve a device from `pool`; False: it is served already."""

def torch_served() -> list[int]:
    """The devices on which PyTorch's memory is served."""

def torch_add_stream(device: int, stream: int) -> None:
    """One of PyTorch's own streams, which live as long as the process."""

def torch_problems() -> tuple[int, str]:
    """How many calls of PyTorch's were refused, and why the first was."""

def torch_functions() -> dict[str, int]:
    """Addresses of the entry points that PyTorch takes by address."""

# -- stacks --------------------------------------------------------------------------------------------------------------
def capture_stack(depth: int = 32, native_depth: int = 0) -> int:
    """Intern the caller's Python frames, and its native ones; 0 when there are none."""

def stack_walker() -> str:
    """Give "interpreter" where frames are walked inside it, "public" where by the public functions."""

def try_stack_walker() -> bool:
    """Compare both ways on the stack at hand; from then on the answer holds. For tests."""

# -- numbers for metrics: native/src/pool/pulse.hpp -----------------------------------------------------------------
BLOCK_RECORD_BYTES: int
BLOCK_FACTS_BYTES: int

def pulse_columns() -> list[tuple[str, str]]:
    """(name, 'gauge' | 'highest' | 'tally') of each number of a row."""

def pulse_bounds() -> tuple[list[int], list[float], int, list[str]]:
    """Upper bounds of request sizes (bytes) and of driver calls (seconds), what a count of sizes is in, words of driver work."""

def read_pulse(
    each_pool: bool = False,
) -> tuple[
    list[tuple[str, str, str, bool, int | None, bool, list[int]]],  # device, pool, kind, live, limit, sized, values
    list[tuple[str, str, bool, int, float, tuple[int, int, float] | None, list[tuple[list[int], float]]]],
    int,  # pools without a row of their own
    int,  # events dropped
]:
    """A row a device, name and kind; with `each_pool` a row a pool. No driver call, no lock of a fast path. Devices: name, version, simulated, total memory, now, (free, total, when), times."""

Held = tuple[
    int, int, int, int, int, float, int, str
]  # bytes and blocks live, stack id, bytes and blocks allocated so far (0: not counted), age of the oldest, bytes older than an hour, tag (by_tag)

def read_holders(by_tag: bool = False) -> list[tuple[str, str, str, int, list[Held]]]:
    """(device, pool, kind, sample bytes (0: exact), what each call stack holds, largest first). Looks at every live block."""

def event_words() -> list[tuple[str, str, str]]:
    """(event, what its number is, what its second number is) of each event of the core; empty: none."""

def drain_events() -> list[tuple[str, str, str, str, str, dict[str, int], float]]:
    """(event, memory kind, device, pool, reason, numbers by field, Unix time) of what happened since the last call, oldest first."""

def last_events() -> list[tuple[str, str, str, str, str, dict[str, int], float]]:
    """The last events of the process, as drain_events gives them, also those that it gave; oldest first."""

def sample_devices() -> bool:
    """Ask the devices for their free memory and look at fences: driver calls. False: one did not answer."""

def resolve_stack(stack: int) -> list[tuple[str, int, str]]:
    """(file, line, function), innermost first."""

# -- page guards ---------------------------------------------------------------------------------------------------------
def page_guard_seed() -> int:
    """What this process draws sides and samples with where no option says it."""

def memory_regions_tool() -> str:
    """Say why no attached tool is told of blocks (NVTX); empty: one is."""

# -- scopes --------------------------------------------------------------------------------------------------------------
def enter_scope(name: str) -> int:
    """What the program does from here on; gives the number by which it is left. 0: it could not be kept."""

def leave_scope(scope: int) -> None: ...

# -- replay --------------------------------------------------------------------------------------------------------------
def replay(
    pool: Pool,
    actions: bytes,
    ids: bytes,
    sizes: bytes,
    streams: bytes,
    handles: list[int] | tuple[int, ...],
    *,
    passes: int,
    verify: bool,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The native loop. Arrays of one event each: actions uint8 (1 alloc, 0 free), ids uint32 (a block's number), sizes uint64 (bytes),
    streams uint32 (index into handles). One timed first pass (`cold`), then `passes` more. Gives ns_per_event_cold, ns_per_event (median of
    the passes), peak_live_bytes, peak_reserved_bytes, live_at_end_bytes, failures, verify_errors, first_failure (text)."""

# -- what a method costs that does nothing: for streampool bench ----------------------------------------------------------
class _EmptyPair:
    def __init__(self) -> None: ...
    def allocate_raw(self, size: int, *, stream: object = None) -> int: ...
    def free_raw(self, ptr: int, *, stream: object = None) -> None: ...
    def nothing(self) -> None: ...

# -- pools of the C ABI: pool.cpp ----------------------------------------------------------------------------------------
def watch_c_pools(mode: str | None) -> None: ...
def forget_c_pools() -> None: ...
def c_pools() -> list[tuple[int, Pool | None]]: ...
def take_told_c_faults() -> list[tuple[int, list[dict[str, Any]]]]: ...
def take_ended_c_pools() -> list[dict[str, Any]]: ...

# -- the end -------------------------------------------------------------------------------------------------------------
def set_exiting() -> None: ...
def build_info() -> dict[str, str]: ...
