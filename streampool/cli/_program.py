"""Finding a Python program and running it as ``python`` would: a script, a module, a folder or a console script."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

__all__ = ["NoProgram", "Program", "find"]

_SHEBANG_BYTES = 512


class NoProgram(click.UsageError):
    """There is nothing to run under that name."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program ready to run: what ``sys.argv`` and ``sys.path[0]`` will be, and how it starts."""

    argv: list[str]
    path0: str
    start: Callable[[], Any]

    def run(self) -> None:
        """Run it to its end in this process. Whatever it raises comes out."""
        sys.argv[:] = self.argv
        if not sys.flags.safe_path:
            # Ours is the folder of the console script, or the current one for `python -m`.
            sys.path[0] = self.path0
        self.start()


def find(script: str, args: list[str], *, is_module: bool) -> Program:
    """Find what `script` names; a usage error says why there is nothing to run."""
    if not script:
        raise NoProgram(f"The program's name is empty: give {'a module' if is_module else 'a script'}.")
    if is_module:
        return _module(script, args)
    path = Path(script)
    try:
        if path.is_dir() or _is_archive(path):
            return _with_main(script, args)
        exists = path.exists()
    except OSError as error:
        raise NoProgram(f"{script!r} cannot be read: {error.strerror}.") from None
    if exists:
        return _file(path, script, args)
    if os.sep not in script:
        found = shutil.which(script)
        if found is not None:
            return _console_script(Path(found), args)
    hint = f" Did you mean `-m {script}`?" if _is_importable(script) else ""
    where = "" if os.sep in script else ", neither as a file nor as a command on PATH"
    raise NoProgram(f"There is no {script!r}{where}.{hint}")


def _is_archive(path: Path) -> bool:
    if path.suffix == ".py" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _is_importable(name: str) -> bool:
    try:
        return name.isidentifier() and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _with_main(script: str, args: list[str]) -> Program:
    """Run a folder or a zip archive by its ``__main__``."""
    if importlib.machinery.PathFinder.find_spec("__main__", [script]) is None:
        what = "folder" if Path(script).is_dir() else "archive"
        raise NoProgram(f"{script!r} cannot be run: the {what} has no __main__.py.")
    return Program([script, *args], script, lambda: runpy.run_path(script, run_name="__main__"))


def _file(path: Path, script: str, args: list[str]) -> Program:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise NoProgram(f"{script} cannot be read: {error.strerror}") from None
    if b"\0" in source[:_SHEBANG_BYTES]:
        raise NoProgram(f"{script} is not a Python program.")
    absolute = str(path.absolute())

    def start() -> None:
        loader = importlib.machinery.SourceFileLoader("__main__", absolute)
        module = _new_main(file=absolute, loader=loader, spec=None, package=None)
        exec(compile(source, absolute, "exec", dont_inherit=True), module.__dict__)

    return Program([script, *args], str(path.absolute().resolve().parent), start)


def _console_script(path: Path, args: list[str]) -> Program:
    with path.open("rb") as file:
        first = file.read(_SHEBANG_BYTES).split(b"\n")[0]
    if b"python" not in first or not first.startswith(b"#!"):
        raise NoProgram(f"{path} is not a Python program: only those can be watched.")
    return _file(path, str(path), args)


def _module(name: str, args: list[str]) -> Program:
    if not all(name.split(".")):
        raise NoProgram(f"{name!r} is not a module's name.")

    def start() -> None:
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
            spec = None
        code = (
            None if spec is None or spec.loader is None else getattr(spec.loader, "get_code", lambda _: None)(spec.name)
        )
        if spec is None or code is None:
            raise NoProgram(f"There is no module {name!r} that can be run.")
        sys.argv[0] = spec.origin or name
        module = _new_main(file=spec.origin, loader=spec.loader, spec=spec, package=spec.parent)
        exec(code, module.__dict__)

    return Program([name, *args], os.getcwd(), start)


def _new_main(*, file: str | None, loader: Any, spec: Any, package: str | None) -> types.ModuleType:
    """Put a fresh ``__main__`` in place. It stays: threads and exit handlers of the program still use it."""
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __builtins__=builtins, __file__=file, __cached__=None, __loader__=loader, __spec__=spec, __package__=package
    )
    sys.modules["__main__"] = module
    return module
