"""Runs at the start of each Python that a program under ``streampool run`` starts: PYTHONPATH names this folder there.

Watches the process as its parent is watched, then runs the ``sitecustomize`` that would have run without us. Imports
nothing of ours before it is sure that this is such a child.
"""

import os
import sys

_HELPER = "multiprocessing.resource_tracker"  # no program of anybody's, and outlives the one that it helps
_HERE = os.path.dirname(os.path.abspath(__file__))


def _begin() -> None:
    settings = os.environ.get("STREAMPOOL_WATCHED_BY", "")
    if not settings or any(_HELPER in argument for argument in sys.orig_argv[1:]):
        return
    try:
        from streampool.attach import _children
    except Exception as error:  # another environment's Python, without streampool: its program runs all the same
        try:
            import json

            facts = {"pid": os.getpid(), "command": sys.orig_argv, "problem": f"{type(error).__name__}: {error}"}
            folder = json.loads(settings)["folder"]
            with open(os.path.join(folder, f"{os.getpid()}.begun"), "w", encoding="utf-8") as file:
                json.dump(facts, file)
        except Exception:
            return
        return
    _children.begin_here(settings)


def _run_the_next() -> None:
    import importlib.machinery
    import importlib.util

    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    sys.path[:] = path
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_begin()
_run_the_next()
