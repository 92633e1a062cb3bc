"""Compiles the workers of allocators that are C++ libraries, where a compiler and their headers are found.

The sources came with the package, or are those of a source tree. What was compiled stays in a cache, under a name made
of everything it depends on. Nothing here imports the libraries: only their folders are looked for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from streampool import _paths
from streampool._versions import installed

__all__ = ["FAMILIES", "NotBuiltError", "build_all", "default_cache", "sources"]

_TOOLKITS = (Path("/usr/local/cuda"),)
_LONGEST = 300  # seconds one program may take to compile


class NotBuiltError(Exception):
    """A worker cannot be compiled here; the text says why."""


@dataclass(slots=True)
class Recipe:
    """What the compiler is told beyond the source. Folders of libraries are also where the program looks for them."""

    includes: list[Path] = field(default_factory=list)
    library_folders: list[Path] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    versions: str = ""


def _package(module: str) -> Path:
    """Give the folder of an installed package, which is not imported."""
    spec = find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise NotBuiltError(f"the package {module} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _toolkit() -> Recipe:
    """Give headers and library of the CUDA runtime: a toolkit's, or those of NVIDIA's packages."""
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if nvcc := shutil.which("nvcc"):
        roots.append(Path(nvcc).resolve().parents[1])
    for root in (*roots, *_TOOLKITS):
        include = root / "include"
        libraries = [folder for name in ("lib64", "lib") if list((folder := root / name).glob("libcudart.so*"))]
        if (include / "cuda_runtime.h").is_file() and libraries:
            return Recipe([include, *_existing(include / "cccl")], libraries[:1], [_runtime(libraries[0])])
    raise NotBuiltError(
        "no CUDA toolkit with cuda_runtime.h and libcudart was found (CUDA_HOME, nvcc, /usr/local/cuda)"
    )


def _existing(*folders: Path) -> list[Path]:
    return [folder for folder in folders if folder.is_dir()]


def _runtime(folder: Path) -> str:
    """Give how the linker calls the runtime: a toolkit has the plain name, packages only the one with a version."""
    return "cudart" if (folder / "libcudart.so").exists() else f":{next(folder.glob('libcudart.so*')).name}"


def _cub() -> Recipe:
    recipe = _toolkit()
    if not any((folder / "cub" / "util_allocator.cuh").is_file() for folder in recipe.includes):
        raise NotBuiltError("the CUDA toolkit has no cub/util_allocator.cuh")
    return recipe


def _rmm() -> Recipe:
    recipe, rmm, logger = _toolkit(), _package("librmm"), _package("rapids_logger")
    own = [rmm / "include", rmm / "include" / "rapids", logger / "include"]
    if not (own[0] / "rmm").is_dir():
        raise NotBuiltError("the package librmm has no headers")
    recipe.includes[:0] = own  # it needs its own CCCL before the toolkit's
    recipe.library_folders += [rmm / "lib64", logger / "lib64"]
    recipe.libraries += ["rmm", "rapids_logger"]
    recipe.flags.append("-DLIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE")
    recipe.versions = installed("librmm-cu13", "librmm-cu12") or ""
    return recipe


def _torch() -> Recipe:
    recipe, torch = _toolkit(), _package("torch")
    if not (torch / "include" / "c10" / "cuda" / "CUDACachingAllocator.h").is_file():
        raise NotBuiltError("the package torch has no headers of its CUDA allocator")
    recipe.includes.insert(0, torch / "include")
    recipe.library_folders.insert(0, torch / "lib")
    recipe.libraries += ["c10_cuda", "c10"]
    recipe.versions = installed("torch") or ""
    return recipe


FAMILIES: dict[str, Callable[[], Recipe]] = {"cub": _cub, "rmm": _rmm, "torch": _torch}


def default_cache() -> Path:
    """Give the folder that keeps what was compiled."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "streampool" / "bench"


def sources(native: Path | None) -> Path:
    """Give the folder of the workers' sources.

    Raises
    ------
    NotBuiltError
        There are none: they came neither with the package nor in a source tree.
    """
    for folder in (native,) if native is not None else _paths.bench_sources():
        if (folder / "peers" / "runtime.hpp").is_file():
            return folder
    raise NotBuiltError(f"the workers' sources are missing{f' in {native}' if native is not None else ''}")


def build_all(
    families: Iterable[str], native: Path | None, cache: Path | None, progress: Callable[[str], None]
) -> dict[str, Path | str]:
    """Give for each family its program, or why there is none. Compiles several at once."""

    def one(family: str) -> Path | str:
        try:
            return _build(family, sources(native), cache or default_cache(), progress)
        except NotBuiltError as problem:
            return str(problem)

    names = list(families)
    if not names:
        return {}
    with ThreadPoolExecutor(min(len(names), os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def _build(family: str, folder: Path, cache: Path, progress: Callable[[str], None]) -> Path:
    compiler = next(
        (c for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name and (c := shutil.which(name))), ""
    )
    if not compiler:
        raise NotBuiltError("no C++ compiler was found (CXX, c++, g++, clang++)")
    recipe = FAMILIES[family]()
    source = folder / "peers" / f"{family}.cpp"
    command = [compiler, "-std=c++20", "-O3", "-DNDEBUG", *recipe.flags, str(source)]
    for include in recipe.includes:
        command += ["-isystem", str(include)]
    for libraries in recipe.library_folders:
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += [f"-l{library}" for library in recipe.libraries] + ["-lpthread"]

    stamp = hashlib.sha256("\0".join([*command, recipe.versions, _version(compiler)]).encode())
    for path in sorted([source, *folder.glob("*.hpp"), *folder.glob("peers/*.hpp")]):
        stamp.update(path.read_bytes())
    program = cache / f"{family}-{stamp.hexdigest()[:16]}"
    if program.is_file():
        return program
    progress(f"compiling the worker of {family}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch) / family
            done = subprocess.run(
                [*command, "-o", str(made)], capture_output=True, text=True, timeout=_LONGEST, check=False
            )
            if done.returncode != 0:
                lines = done.stderr.splitlines()
                first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
                raise NotBuiltError(f"{source.name} does not compile: {first.strip()}")
            made.replace(program)
    except subprocess.TimeoutExpired:
        raise NotBuiltError(f"{source.name} took longer than {_LONGEST} s to compile") from None
    except OSError as error:
        raise NotBuiltError(f"{cache} cannot be used: {error.strerror}") from None
    return program


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout.partition("\n")[
        0
    ]
