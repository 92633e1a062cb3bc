#include "frames.hpp"

#include <algorithm>

namespace streampool::python {

namespace {

constexpr int kTriedDepth = 64;
bool g_walks_inside = false;

}  // namespace

// The interpreter's own frames, as far as they are needed here. Their layout is fixed within a minor version; the
// header that says it is for the interpreter alone. A version that is not named here, and a build without the GIL, is
// walked by the public functions.
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED) && \
    !defined(PYPY_VERSION) && !defined(GRAALVM_PYTHON)

namespace {

using Unit = std::uint16_t;  // of code: an instruction, its argument, or a cache entry

#if PY_VERSION_HEX < 0x030C0000
struct InnerFrame {
  PyObject *function, *globals, *builtins, *locals;
  PyCodeObject* code;
  PyObject* object;
  InnerFrame* previous;
  Unit* instruction;  // the unit before the next one
  int stacktop;
  bool is_entry;
  char owner;
};
#else
struct InnerFrame {
  PyCodeObject* code;  // 3.13: any object; code of what is not the C stack's
  InnerFrame* previous;
  PyObject *function, *globals, *builtins, *locals;
  PyObject* object;
  Unit* instruction;
  int stacktop;
  std::uint16_t return_offset;
  char owner;
};
#endif
constexpr char kGenerator = 1, kCStack = 3;

const InnerFrame* innermost(PyThreadState* state) {
#if PY_VERSION_HEX < 0x030D0000
  return reinterpret_cast<const InnerFrame*>(state->cframe->current_frame);
#else
  return reinterpret_cast<const InnerFrame*>(state->current_frame);
#endif
}

Unit* first_unit(PyCodeObject* code) { return reinterpret_cast<Unit*>(code->co_code_adaptive); }

// Has not begun yet: nobody is shown such a frame.
bool is_incomplete(const InnerFrame& frame) {
  return frame.owner == kCStack ||
         (frame.owner != kGenerator && frame.instruction < first_unit(frame.code) + frame.code->_co_firsttraceable);
}

}  // namespace

int walk_inside(PyThreadState* state, PythonFrame* frames, int depth) noexcept {
  int count = 0;
  for (const InnerFrame* frame = innermost(state); frame != nullptr; frame = frame->previous) {
#if PY_VERSION_HEX >= 0x030C0000
    if (frame->owner == kCStack && count > 0) frames[count - 1].entry = true;
#endif
    if (is_incomplete(*frame)) continue;
    if (count == depth) break;
    frames[count].code = frame->code;
    frames[count].instruction =
        static_cast<int>((frame->instruction - first_unit(frame->code)) * static_cast<int>(sizeof(Unit)));
#if PY_VERSION_HEX < 0x030C0000
    frames[count].entry = frame->is_entry;
#else
    frames[count].entry = false;
#endif
    ++count;
  }
  return count;
}

bool try_walk_inside() noexcept {
  PythonFrame inside[kTriedDepth], outside[kTriedDepth];
  const int count = walk_public(outside, kTriedDepth);
  // What cannot be compared is not trusted: the module is always imported by somebody's frame.
  g_walks_inside = count > 0 && walk_inside(PyThreadState_Get(), inside, kTriedDepth) == count &&
                   std::equal(inside, inside + count, outside, [](const PythonFrame& a, const PythonFrame& b) {
                     return a.code == b.code && a.instruction == b.instruction;
                   });
  return g_walks_inside;
}

#else

int walk_inside(PyThreadState*, PythonFrame* frames, int depth) noexcept { return walk_public(frames, depth); }
bool try_walk_inside() noexcept { return false; }

#endif

int walk_public(PythonFrame* frames, int depth) noexcept {
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  int count = 0;
  while (frame != nullptr && count < depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    frames[count++] = {code, PyFrame_GetLasti(frame), false};
    Py_DECREF(code);  // the frame holds it until we are done
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return count;
}

int walk_frames(PythonFrame* frames, int depth) noexcept {
  return g_walks_inside ? walk_inside(PyThreadState_Get(), frames, depth) : walk_public(frames, depth);
}

bool walks_inside() noexcept { return g_walks_inside; }

}  // namespace streampool::python
