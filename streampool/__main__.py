"""``python -m streampool``: the command line."""

from __future__ import annotations

from streampool.cli import main

if __name__ == "__main__":
    main()
