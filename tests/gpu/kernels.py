"""Small real kernels, compiled when first used: they write where they are told, right or wrong."""

from __future__ import annotations

import ctypes
from typing import Any

from gpu import driver

__all__ = ["Kernels", "pattern"]

# Every parameter is 64 bits wide, which is what cuda.core makes of a Python int.
_SOURCE = r"""
typedef unsigned char byte;
typedef unsigned long long number;

extern "C" __global__ void write_byte(byte* at, number value) { *at = (byte)value; }

// Byte i becomes i * 31 + seed.
extern "C" __global__ void write_pattern(byte* at, number size, number seed) {
  for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < size; i += (number)gridDim.x * blockDim.x)
    at[i] = (byte)(i * 31 + seed);
}

extern "C" __global__ void copy_bytes(byte* to, const byte* from, number size) {
  for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < size; i += (number)gridDim.x * blockDim.x)
    to[i] = from[i];
}

// Waits a little, then counts the bytes that are not the pattern.
extern "C" __global__ void count_wrong(const byte* at, number size, number seed, number* wrong, number nanoseconds) {
  number begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
  number found = 0;
  for (number i = blockIdx.x * (number)blockDim.x + threadIdx.x; i < size; i += (number)gridDim.x * blockDim.x)
    found += ((const volatile byte*)at)[i] != (byte)(i * 31 + seed);
  if (found) atomicAdd(wrong, found);
}

// Runs until words[0] is not 0, or for so long. words[1]: 1 while it runs, then 2 when it was told to end, 3 when not.
extern "C" __global__ void run_until_told(volatile unsigned* words, number nanoseconds) {
  number begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  words[1] = 1;
  __threadfence_system();
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (words[0] == 0 && now - begin < nanoseconds);
  words[1] = words[0] ? 2 : 3;
}
"""
_THREADS = 256


def pattern(size: int, seed: int) -> bytes:
    """Give what `Kernels.write_pattern` writes."""
    period = bytes((i * 31 + seed) & 0xFF for i in range(256))
    return (period * (size // 256 + 1))[:size]


class Kernels:
    """The kernels, loaded and run once: loading blocks while work is stuck, so it must be over before a gate shuts."""

    def __init__(self, device: Any) -> None:
        from cuda import core

        self._core = core
        compiled = core.Program(_SOURCE, code_type="c++").compile("cubin")
        self._write_byte = compiled.get_kernel("write_byte")
        self._write_pattern = compiled.get_kernel("write_pattern")
        self._copy_bytes = compiled.get_kernel("copy_bytes")
        self._count_wrong = compiled.get_kernel("count_wrong")
        self._run_until_told = compiled.get_kernel("run_until_told")
        stream = device.create_stream()
        scratch = device.allocate(512, stream=stream)
        at = int(scratch.handle)
        self.write_byte(stream, at, 0)
        self.write_pattern(stream, at, 256, 0)
        self.copy(stream, at + 256, at, 256)
        stream.sync()
        assert self.read(at + 256, 256) == pattern(256, 0)
        for where in range(8):
            self.write_byte(stream, at + where, 0)
        self.count_wrong(stream, at + 256, 256, 0, at, 0)
        self.count_wrong(stream, at + 256, 256, 1, at, 0)
        self.run_until_told(stream, at + 256, 0)
        stream.sync()
        assert int.from_bytes(self.read(at, 8), "little") == 256
        scratch.close(stream)
        stream.sync()
        stream.close()

    def write_byte(self, stream: Any, address: int, value: int) -> None:
        """Queue a kernel that writes one byte at an address."""
        self._launch(stream, 1, 1, self._write_byte, address, value)

    def write_pattern(self, stream: Any, address: int, size: int, seed: int) -> None:
        """Queue a kernel that writes `size` bytes of `pattern` at an address."""
        self._launch(stream, self._blocks(size), _THREADS, self._write_pattern, address, size, seed)

    def copy(self, stream: Any, to: int, source: int, size: int) -> None:
        """Queue a kernel that copies `size` bytes."""
        self._launch(stream, self._blocks(size), _THREADS, self._copy_bytes, to, source, size)

    def count_wrong(self, stream: Any, address: int, size: int, seed: int, wrong: int, nanoseconds: int) -> None:
        """Queue a kernel that waits, then adds the number of bytes that are not `pattern` to 8 bytes at `wrong`."""
        self._launch(
            stream, min(8, self._blocks(size)), _THREADS, self._count_wrong, address, size, seed, wrong, nanoseconds
        )

    def run_until_told(self, stream: Any, words: int, nanoseconds: int) -> None:
        """Queue a kernel of one thread that runs until the word at `words` is not 0 (`gpu.running`)."""
        self._launch(stream, 1, 1, self._run_until_told, words, nanoseconds)

    @staticmethod
    def read(address: int, size: int) -> bytes:
        """Give bytes of any memory that the device can reach, now: nothing waits, so the work must be done."""
        from cuda.bindings import driver as cuda

        there = ctypes.create_string_buffer(size)
        driver.ok(cuda.cuMemcpyDtoH(ctypes.addressof(there), address, size))
        return there.raw

    @staticmethod
    def _blocks(size: int) -> int:
        return max(1, min(256, -(-size // _THREADS)))

    def _launch(self, stream: Any, blocks: int, threads: int, kernel: Any, *arguments: int) -> None:
        config = self._core.LaunchConfig(grid=blocks, block=threads)
        self._core.launch(self._object(stream), config, kernel, *arguments)

    def _object(self, stream: Any) -> Any:
        if not isinstance(stream, int):
            return stream
        if stream == driver.PER_THREAD:
            return self._core.PER_THREAD_DEFAULT_STREAM
        if stream in (0, driver.LEGACY):
            return self._core.LEGACY_DEFAULT_STREAM
        return self._core.Stream.from_handle(stream)
