// The calling thread's Python frames as (code, instruction) pairs, innermost first. Two ways to walk them: inside the
// interpreter, whose frames have a layout that is known for some versions, and by the public functions, which make a
// frame object of each and cost ten times as much. Imports Python only.
#pragma once

#include <Python.h>

#include <cstdint>

namespace streampool::python {

// Without initial values: a capture has room for many and writes a few.
struct PythonFrame {
  PyCodeObject* code;  // borrowed: the frame holds it while it runs
  int instruction;     // offset in bytes, as PyFrame_GetLasti gives it
  // The interpreter was entered with this frame: below it, on the C stack, is what called it. By the public functions
  // this cannot be known.
  bool entry;
};

// Both raise nothing, and give how many they found. The first needs no GIL: `state` is the calling thread's own, whose
// frames stand still while it is here. The second needs it.
int walk_inside(PyThreadState* state, PythonFrame* frames, int depth) noexcept;
int walk_public(PythonFrame* frames, int depth) noexcept;
// The first where it works, else the second; with the GIL.
int walk_frames(PythonFrame* frames, int depth) noexcept;

// Whether this version's layout is known and gives what the public functions give, tried on the stack at hand. Asked
// when the module is imported; from then on walk_frames() is settled.
bool try_walk_inside() noexcept;
bool walks_inside() noexcept;

}  // namespace streampool::python
