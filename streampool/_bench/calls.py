"""What a call from Python costs: one table of calls, each a tight loop over an allocation of 4 KiB and its free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streampool._bench import libraries, loops
from streampool._bench.call import SIZE, Call, Loop, check, ordinal_of, settings_of

__all__ = ["CALLS", "DEPTH", "FEATURES", "loops_of"]

DEPTH = 10  # Python frames around a call in the kind debug


def _deep(loop: Loop, depth: int = DEPTH) -> Loop:
    """Give the loop with so many Python frames around it."""
    if depth <= 1:
        return loop

    def outer(n: int) -> None:
        loop(n)

    return _deep(outer, depth - 1)


# -- streampool --------------------------------------------------------------------------------------------------------


def _pool(device: str, options: str, mode: str = "production") -> tuple[Any, Any, int]:
    import streampool as sp

    made = sp.Device(device)
    pool: Any = sp.Pool(made, **settings_of(options, mode))
    stream = made.create_stream()
    pool.register_stream(stream)
    return pool, stream, int(stream.handle)


def _raw(pool: Any, stream: Any, handle: int) -> Loop:
    # The loop keeps the stream: a registered one that is gone crashes the driver when it is fenced.
    def loop(n: int, allocate: Any = pool.allocate_raw, free: Any = pool.free_raw, _kept: Any = stream) -> None:
        for _ in range(n):
            free(allocate(SIZE, stream=handle), stream=handle)

    return loop


def _streampool_raw(device: str, options: str) -> Loop:
    return _raw(*_pool(device, options))


def _streampool_buffer(device: str, options: str) -> Loop:
    pool, stream, _ = _pool(device, options)

    def loop(n: int, allocate: Any = pool.allocate) -> None:
        for _ in range(n):
            allocate(SIZE, stream=stream)

    return loop


def _streampool_debug(device: str, options: str) -> Loop:
    return _deep(_raw(*_pool(device, f"stack_depth={DEPTH}:{options}", "debug")))


def _streampool_stacks(device: str, options: str) -> Loop:
    return _deep(_raw(*_pool(device, f"stack_depth={DEPTH}:{options}")))


def _empty(device: str, options: str) -> Loop:
    from streampool import _core

    pair = _core._EmptyPair()

    def loop(n: int, allocate: Any = pair.allocate_raw, free: Any = pair.free_raw) -> None:
        for _ in range(n):
            free(allocate(SIZE, stream=SIZE), stream=SIZE)

    return loop


def _nothing(device: str, options: str) -> Loop:
    from streampool import _core

    pair = _core._EmptyPair()

    def loop(n: int, nothing: Any = pair.nothing) -> None:
        for _ in range(n):
            nothing()
            nothing()

    return loop


# -- PyTorch, CuPy, RMM, cuda.core, Numba ------------------------------------------------------------------------------


def _torch_pinned(device: str, options: str) -> Loop:
    torch = loops.torch_on(device)
    empty, kind = torch.empty, torch.uint8

    def loop(n: int) -> None:
        for _ in range(n):
            empty(SIZE, dtype=kind, pin_memory=True)

    return loop


def _torch_history(stacks: str, deep: bool) -> Callable[[str, str], Loop]:
    def make(device: str, options: str) -> Loop:
        loop = loops.torch_empty(device)
        loops.torch_on(device).cuda.memory._record_memory_history(
            enabled="all", context="all", stacks=stacks, max_entries=100_000
        )
        return _deep(loop) if deep else loop

    return make


def _cupy_pool(name: str) -> Callable[[str, str], Loop]:
    def make(device: str, options: str) -> Loop:
        malloc = getattr(loops.cupy_on(device).cuda, name)().malloc

        def loop(n: int) -> None:
            for _ in range(n):
                malloc(SIZE)

        return loop

    return make


def _rmm_pool(tracking: bool = False) -> Any:
    import rmm.mr

    pool = loops.rmm_pool()
    return rmm.mr.TrackingResourceAdaptor(pool, capture_stacks=True) if tracking else pool


def _rmm_raw(device: str, options: str) -> Loop:
    return _rmm_loop(_rmm_pool())


def _rmm_tracking(device: str, options: str) -> Loop:
    return _deep(_rmm_loop(_rmm_pool(tracking=True)))


def _rmm_loop(resource: Any) -> Loop:
    def loop(n: int, allocate: Any = resource.allocate, deallocate: Any = resource.deallocate) -> None:
        for _ in range(n):
            deallocate(allocate(SIZE), SIZE)

    return loop


def _rmm_buffer(tracking: bool) -> Callable[[str, str], Loop]:
    def make(device: str, options: str) -> Loop:
        import rmm

        rmm.mr.set_current_device_resource(_rmm_pool(tracking))
        loop = loops.rmm_buffer(device)
        return _deep(loop) if tracking else loop

    return make


def _cuda_core(device: str, options: str) -> Loop:
    from cuda.core import Device

    made = Device(ordinal_of(device))
    made.set_current()
    stream, resource = made.create_stream(), made.memory_resource

    def loop(n: int) -> None:
        for _ in range(n):
            resource.allocate(SIZE, stream=stream).close()

    return loop


def _cuda_bindings(device: str, options: str) -> Loop:
    from cuda.bindings import driver

    check(driver.cuInit(0))
    number = check(driver.cuDeviceGet(ordinal_of(device)))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(number))))
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    pool = check(driver.cuDeviceGetDefaultMemPool(number))
    keep = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    check(driver.cuMemPoolSetAttribute(pool, keep, driver.cuuint64_t(2**63)))

    def loop(n: int, allocate: Any = driver.cuMemAllocAsync, free: Any = driver.cuMemFreeAsync) -> None:
        for _ in range(n):
            _, pointer = allocate(SIZE, stream)
            free(pointer, stream)

    return loop


# What debug mode is made of: each with the options that switch on it and what it cannot be without.
FEATURES: dict[str, tuple[str, str]] = {
    "none": ("production mode, nothing of it", ""),
    "track": ("tracking: number, thread and time of each block", "track=true"),
    "stacks": (f"Python stacks of depth {DEPTH}", f"stack_depth={DEPTH}"),
    "native-stacks": (f"Python and native stacks of depth {DEPTH}", f"stack_depth={DEPTH}:native_depth={DEPTH}"),
    "guards": ("guards of 256 bytes, without fill", "guard_bytes=256"),
    "fill": ("guards and fill", "guard_bytes=256:fill=true"),
    "edges": ("guards and fill of 64 bytes at each end", "guard_bytes=256:fill=true:fill_edge_bytes=64"),
    "quarantine": ("guards, fill and a quarantine of 64 MiB", "guard_bytes=256:fill=true:quarantine_bytes=64MiB"),
    "untouched": ("guards, fill, and untouched bytes counted", "guard_bytes=256:fill=true:count_untouched=true"),
    "page-guards-sampled": ("page guards, one block in 64 MiB", "page_guards=sampled"),
    "page-guards": ("page guards for every block", "page_guards=all"),
    "debug": ("mode debug: all but page guards", f"mode=debug:stack_depth={DEPTH}"),
}


def _streampool_feature(feature: str) -> Callable[[str, str], Loop]:
    def make(device: str, options: str) -> Loop:
        return _deep(_raw(*_pool(device, f"{FEATURES[feature][1]}:{options}")))

    return make


CALLS: tuple[Call, ...] = (
    Call("empty", "empty nanobind method pair, the same arguments", "python", "empty", "streampool", "", _empty, False),
    Call("nothing", "empty nanobind method pair, no arguments", "python", "empty", "streampool", "", _nothing, False),
    Call("raw", "streampool allocate_raw + free_raw", "python", "streampool", "streampool", "", _streampool_raw, False),
    Call(
        "buffer", "streampool allocate + drop of the Buffer", "python", "streampool", "streampool", "",
        _streampool_buffer, False,
    ),
    Call("cupy", "CuPy MemoryPool.malloc", "python", "cupy", "cupy", "cupy", _cupy_pool("MemoryPool")),
    Call(
        "cupy-async", "CuPy MemoryAsyncPool.malloc", "python", "cupy-async", "cupy", "cupy",
        _cupy_pool("MemoryAsyncPool"),
    ),
    Call("cupy-empty", "cupy.empty", "python", "cupy", "cupy", "cupy", loops.own(loops.cupy_empty)),
    Call("torch-raw", "PyTorch raw alloc + delete", "python", "torch", "torch", "torch", loops.own(loops.torch_raw)),
    Call("torch-empty", "torch.empty", "python", "torch", "torch", "torch", loops.own(loops.torch_empty)),
    Call("torch-pinned", "torch.empty, pinned", "python", "torch", "torch", "torch", _torch_pinned),
    Call("rmm-raw", "RMM pool, allocate + deallocate", "python", "rmm-pool", "rmm", "rmm", _rmm_raw),
    Call("rmm-buffer", "rmm.DeviceBuffer on a pool", "python", "rmm-pool", "rmm-buffer", "rmm", _rmm_buffer(False)),
    Call("cuda-core", "cuda.core allocate + close", "python", "cuda-core", "cuda-core", "cuda.core", _cuda_core),
    Call(
        "cuda-bindings", "cuda.bindings cuMemAllocAsync + cuMemFreeAsync", "python", "cuda-bindings", "cuda-bindings",
        "cuda.bindings", _cuda_bindings,
    ),
    Call("numba", "numba.cuda.device_array", "python", "numba", "numba", "numba", loops.own(loops.numba_array)),
    Call(
        "debug-raw", "streampool debug, raw calls, Python stacks of depth 10", "debug", "streampool",
        "streampool-debug", "", _streampool_debug, False,
    ),
    Call(
        "stacks-raw", "streampool production, raw calls, Python stacks of depth 10", "debug", "streampool",
        "streampool-stacks", "", _streampool_stacks, False,
    ),
    Call(
        "rmm-tracking-raw", "RMM pool + tracking with stacks, raw calls", "debug", "rmm-stacks", "rmm-tracking", "rmm",
        _rmm_tracking,
    ),
    Call(
        "rmm-tracking-buffer", "rmm.DeviceBuffer, tracking with stacks", "debug", "rmm-stacks", "rmm-tracking-buffer",
        "rmm", _rmm_buffer(True),
    ),
    Call(
        "torch-history", "torch.empty, memory history, Python stacks", "debug", "torch", "torch-history", "torch",
        _torch_history("python", True),
    ),
    Call(
        "torch-history-all", "torch.empty, memory history, all stacks", "debug", "torch", "torch-history-all", "torch",
        _torch_history("all", True),
    ),
    *(
        Call(
            f"feature-{feature}", label, "features", "streampool", f"feature-{feature}", "",
            _streampool_feature(feature), False,
        )
        for feature, (label, _) in FEATURES.items()
    ),
    *(
        Call(
            f"libraries-{name}", label, "libraries", "streampool", "libraries", "", make, False,
            facts={"memory": "streampool"},
        )
        for name, label, make in (
            ("raw", "streampool allocate_raw + free_raw", _streampool_raw),
            ("buffer", "streampool allocate + drop of the Buffer", _streampool_buffer),
        )
    ),
    *libraries.CALLS,
)  # fmt: skip


def loops_of(process: str, device: str, options: str) -> dict[str, Loop]:
    """Make the loops of one process, by name. A loop that cannot be made raises when it is called."""
    made: dict[str, Loop] = {}
    for call in CALLS:
        if call.process != process:
            continue
        try:
            made[call.name] = call.make(device, options)
        except Exception as error:
            made[call.name] = _failing(error)
    if not made:
        raise ValueError(f"there is no process {process!r}")
    return made


def _failing(error: Exception) -> Loop:
    def loop(n: int) -> None:
        raise error

    return loop
