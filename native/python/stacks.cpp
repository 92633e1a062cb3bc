// Python call stacks: taken as (code, instruction) pairs, interned to a small number, resolved only when reported.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <deque>
#include <unordered_map>
#include <vector>

#include "arguments.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

struct Frame {
  PyCodeObject* code;  // owned by the table once interned
  int instruction;
  bool operator==(const Frame&) const = default;
};

// Guarded by the GIL. Code objects are kept: a report may come long after the function is gone.
struct StackTable {
  std::deque<std::vector<Frame>> stacks;  // id - 1
  std::unordered_multimap<std::size_t, debug::StackId> by_hash;
};
StackTable& table() {
  static StackTable* t = new StackTable;
  return *t;
}

constexpr int kMaxDepth = 64;

constexpr Whole<int> kDepth{"depth", "a number of frames"};

// Nothing may be raised and the caller's error state must survive.
int walk(Frame* frames, int depth) {
  PyThreadState* state = PyThreadState_Get();
  PyFrameObject* frame = PyThreadState_GetFrame(state);
  int count = 0;
  while (frame != nullptr && count < depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    frames[count++] = {code, PyFrame_GetLasti(frame)};
    Py_DECREF(code);  // the frame holds it until we are done
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return count;
}

}  // namespace

debug::StackId capture_stack(int depth) noexcept {
  if (depth <= 0 || !PyGILState_Check()) return 0;
  Frame frames[kMaxDepth];
  const int count = walk(frames, std::min(depth, kMaxDepth));
  if (count == 0) return 0;
  std::size_t hash = 1469598103934665603ull;
  for (int i = 0; i < count; ++i) {
    hash = (hash ^ reinterpret_cast<std::size_t>(frames[i].code)) * 1099511628211ull;
    hash = (hash ^ static_cast<std::size_t>(frames[i].instruction)) * 1099511628211ull;
  }
  StackTable& t = table();
  const auto [first, last] = t.by_hash.equal_range(hash);
  for (auto it = first; it != last; ++it) {
    const std::vector<Frame>& known = t.stacks[it->second - 1];
    if (known.size() == static_cast<std::size_t>(count) && std::equal(known.begin(), known.end(), frames))
      return it->second;
  }
  try {
    t.stacks.emplace_back(frames, frames + count);
    const debug::StackId id = static_cast<debug::StackId>(t.stacks.size());
    t.by_hash.emplace(hash, id);
    for (int i = 0; i < count; ++i) Py_INCREF(frames[i].code);
    return id;
  } catch (...) {
    return 0;
  }
}

std::string site_of(debug::StackId stack) try {
  if (stack == 0 || stack > table().stacks.size()) return {};
  const Frame& top = table().stacks[stack - 1].front();
  const nb::handle code(reinterpret_cast<PyObject*>(top.code));
  return nb::cast<std::string>(code.attr("co_filename")) + ":" +
         std::to_string(PyCode_Addr2Line(top.code, top.instruction)) + " in " +
         nb::cast<std::string>(code.attr("co_qualname"));
} catch (...) {
  PyErr_Clear();  // a file name that is no text: the number of the stack stays
  return {};
}

std::vector<debug::SourceFrame> frames_of(debug::StackId stack) noexcept try {
  std::vector<debug::SourceFrame> out;
  if (stack == 0 || stack > table().stacks.size()) return out;
  const std::vector<Frame> frames = table().stacks[stack - 1];
  for (const Frame& f : frames) {
    const auto text = [](PyObject* object) {
      Py_ssize_t size = 0;
      const char* words = PyUnicode_AsUTF8AndSize(object, &size);
      if (words != nullptr) return std::string(words, static_cast<std::size_t>(size));
      PyErr_Clear();
      return std::string("?");
    };
    out.push_back({text(f.code->co_filename), PyCode_Addr2Line(f.code, f.instruction), text(f.code->co_qualname)});
  }
  return out;
} catch (...) {
  return {};
}

void bind_stacks(nb::module_& m) {
  m.def("capture_stack", [](Given<kDepth> depth) { return capture_stack(*depth); }, parameter<kDepth>() = 32);
  m.def(
      "resolve_stack",
      [](Given<kStack> stack) {
        nb::list out;
        if (*stack == 0 || *stack > table().stacks.size()) return out;
        const std::vector<Frame> frames = table().stacks[*stack - 1];
        for (const Frame& f : frames) {
          const nb::handle code(reinterpret_cast<PyObject*>(f.code));
          const int line = PyCode_Addr2Line(f.code, f.instruction);
          out.append(nb::make_tuple(code.attr("co_filename"), line, code.attr("co_qualname")));
        }
        return out;
      },
      parameter<kStack>());
}

}  // namespace streampool::python
