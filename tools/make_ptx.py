"""Regenerates the PTX of the CUDA kernels (``make ptx``), or says whether it is stale.

Builds never compile CUDA: the PTX is committed as ``native/src/driver/cuda/pattern_ptx.hpp``. It is made by NVRTC of
CUDA 12.0, so that every driver from CUDA 12.0 on takes it::

    pip install "nvidia-cuda-nvrtc-cu12==12.0.*"
    python tools/make_ptx.py            # writes the file
    python tools/make_ptx.py --check    # needs no NVRTC; exit code 1 when the sources changed since
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import re
import sys
from pathlib import Path

__all__ = ["check", "main", "make"]

ROOT = Path(__file__).resolve().parent.parent
DRIVER = ROOT / "native" / "src" / "driver"
SOURCE = DRIVER / "cuda" / "pattern.cu"
HEADERS = (DRIVER / "pattern.hpp", DRIVER / "cuda" / "pattern_piece.hpp")
TARGET = DRIVER / "cuda" / "pattern_ptx.hpp"
OPTIONS = (b"--gpu-architecture=compute_52", b"--std=c++17")
PTX_VERSION = ".version 8.0"


def sources_digest() -> str:
    """Return the SHA-256 of what the PTX is made from, as hexadecimal digits."""
    digest = hashlib.sha256()
    for path in (SOURCE, *HEADERS):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(b" ".join(OPTIONS))
    return digest.hexdigest()


def check() -> bool:
    """Return whether the committed PTX was made from the sources as they are now."""
    if not TARGET.exists():
        return False
    found = re.search(r"^// sources: ([0-9a-f]{64})$", TARGET.read_text(), re.MULTILINE)
    return found is not None and found.group(1) == sources_digest()


def load_nvrtc(path: str | None) -> ctypes.CDLL:
    """Load NVRTC from `path`, or from the installed wheel."""
    if path is None:
        spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit('NVRTC is not installed: pip install "nvidia-cuda-nvrtc-cu12==12.0.*", or give --nvrtc.')
        path = str(Path(next(iter(spec.submodule_search_locations))) / "lib" / "libnvrtc.so.12")
    return ctypes.CDLL(path)


def compile_ptx(nvrtc: ctypes.CDLL) -> str:
    """Compile the kernels and return the PTX text; a compiler error ends the program with its log."""

    def need(result: int) -> None:
        if result != 0:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise SystemExit(f"NVRTC: {nvrtc.nvrtcGetErrorString(result).decode()}")

    program = ctypes.c_void_p()
    texts = (ctypes.c_char_p * len(HEADERS))(*(path.read_bytes() for path in HEADERS))
    names = (ctypes.c_char_p * len(HEADERS))(*(path.name.encode() for path in HEADERS))
    need(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), len(HEADERS), texts, names
        )
    )
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    result = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    size = ctypes.c_size_t()
    need(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    need(nvrtc.nvrtcGetProgramLog(program, log))
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    need(result)
    need(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    ptx = ctypes.create_string_buffer(size.value)
    need(nvrtc.nvrtcGetPTX(program, ptx))
    need(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))
    return ptx.value.decode()


def make(nvrtc_path: str | None) -> None:
    """Write the PTX file."""
    ptx = compile_ptx(load_nvrtc(nvrtc_path))
    if PTX_VERSION not in ptx:
        raise SystemExit(f"this NVRTC does not write '{PTX_VERSION}', which old drivers need: use CUDA 12.0's wheel.")
    TARGET.write_text(
        "// The kernels of pattern.cu as PTX. Made by `make ptx` (tools/make_ptx.py): do not edit. Imports nothing.\n"
        f"// sources: {sources_digest()}\n"
        "#pragma once\n\n"
        "namespace streampool::driver::cuda {\n\n"
        f'inline constexpr char kPatternPtx[] = R"ptx({ptx.strip()}\n)ptx";\n\n'
        "}  // namespace streampool::driver::cuda\n"
    )
    print(f"wrote {TARGET.relative_to(ROOT)}, {len(ptx)} bytes of PTX")


def main() -> int:
    """Run the command line; 1 when ``--check`` finds the PTX stale."""
    parser = argparse.ArgumentParser(
        description="Make the PTX of the CUDA kernels.", epilog="example: make_ptx.py --check"
    )
    parser.add_argument("--check", action="store_true", help="only say whether the committed PTX is stale")
    parser.add_argument("--nvrtc", metavar="FILE", help="libnvrtc.so.12 to use (default: the installed wheel's)")
    arguments = parser.parse_args()
    if not arguments.check:
        make(arguments.nvrtc)
        return 0
    if check():
        print("the PTX is up to date")
        return 0
    print("the PTX is stale: run `make ptx`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
