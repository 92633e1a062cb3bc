"""What ``streampool bench`` is made of: allocators side by side, each in a process of its own, measured in turns.

``peers`` is the table of allocators and finds out which are here, ``builds`` compiles the workers of those that need
it, ``worker`` talks to one, ``kinds`` says what is measured, ``engine`` measures it, ``budgets`` holds the figures
against what the design promises, ``tables`` and ``plot`` show them. ``python_worker``, ``calls`` and ``libraries`` run
in the workers that are Python programs; `machine` says where all this happened.
"""
