// Call stacks: taken as (code, instruction) pairs and return addresses, interned to a small number, and put into words
// only when somebody reports them.
#include <nanobind/stl/string.h>

#include <cxxabi.h>
#include <dlfcn.h>
#include <unwind.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "arguments.hpp"
#include "base/spin_lock.hpp"
#include "debug/capture.hpp"
#include "frames.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

// A frame of an interned stack. Python's come first, innermost first; then return addresses, innermost first. Without
// initial values: a capture has room for many and writes a few.
struct Frame {
  enum class Kind : std::uint32_t { python, entry, native };  // entry: the interpreter was entered with it
  std::uintptr_t what;                                        // a code object, which the table owns; or an address
  std::int32_t instruction;
  Kind kind;
  bool operator==(const Frame&) const = default;
};

constexpr int kMaxDepth = 64;  // of each kind

std::uint64_t hash_of(const Frame* frames, std::size_t count) {
  std::uint64_t hash = count;
  for (std::size_t i = 0; i < count; ++i) {
    hash =
        (hash ^ frames[i].what ^ static_cast<std::uint64_t>(static_cast<std::uint32_t>(frames[i].instruction)) << 40) *
        0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

// Every stack that was ever seen. What is in it stays: a report may come long after the function is gone. Its lock is
// held for a look-up; the GIL is not enough, since threads without Python have stacks too.
class StackTable {
 public:
  // 0 where it cannot be kept. With the GIL where there are frames of Python.
  debug::StackId intern(const Frame* frames, std::size_t count) {
    const std::uint64_t hash = hash_of(frames, count);
    const std::lock_guard lock(lock_);
    const debug::StackId known = find(hash, frames, count);
    return known != 0 ? known : add(hash, frames, count);
  }

  // The same stack as before, or 0; without the GIL.
  debug::StackId known(const Frame* frames, std::size_t count) {
    const std::uint64_t hash = hash_of(frames, count);
    const std::lock_guard lock(lock_);
    return find(hash, frames, count);
  }

  std::vector<Frame> frames(debug::StackId id) {
    const std::lock_guard lock(lock_);
    if (id == 0 || id > stacks_.size()) return {};
    const Stack& stack = stacks_[id - 1];
    const auto first = frames_.begin() + static_cast<std::ptrdiff_t>(stack.first);
    return {first, first + stack.count};
  }

 private:
  struct Stack {
    std::uint64_t hash = 0;
    std::size_t first = 0;
    std::uint32_t count = 0;
  };

  debug::StackId find(std::uint64_t hash, const Frame* frames, std::size_t count) const {
    for (std::size_t at = hash & mask_;; at = (at + 1) & mask_) {
      const debug::StackId id = slots_[at];
      if (id == 0) return 0;
      const Stack& known = stacks_[id - 1];
      if (known.hash == hash && known.count == count && std::equal(frames, frames + count, &frames_[known.first]))
        return id;
    }
  }
  debug::StackId add(std::uint64_t hash, const Frame* frames, std::size_t count) try {
    if (2 * (stacks_.size() + 1) > slots_.size()) grow();
    const std::size_t first = frames_.size();
    frames_.insert(frames_.end(), frames, frames + count);
    stacks_.push_back({hash, first, static_cast<std::uint32_t>(count)});
    const debug::StackId id = static_cast<debug::StackId>(stacks_.size());
    place(hash, id);
    for (std::size_t i = 0; i < count; ++i)
      if (frames[i].kind != Frame::Kind::native) Py_INCREF(reinterpret_cast<PyObject*>(frames[i].what));
    return id;
  } catch (...) {
    return 0;
  }
  void place(std::uint64_t hash, debug::StackId id) {
    std::size_t at = hash & mask_;
    while (slots_[at] != 0) at = (at + 1) & mask_;
    slots_[at] = id;
  }
  void grow() {
    slots_ = std::vector<debug::StackId>(slots_.size() * 2);
    mask_ = slots_.size() - 1;
    for (std::size_t i = 0; i < stacks_.size(); ++i) place(stacks_[i].hash, static_cast<debug::StackId>(i + 1));
  }

  SpinLock lock_;
  std::vector<Stack> stacks_;  // id - 1
  std::vector<Frame> frames_;
  std::vector<debug::StackId> slots_ = std::vector<debug::StackId>(1024);  // by hash; at most half full
  std::size_t mask_ = slots_.size() - 1;
};
StackTable& table() {
  static StackTable* t = new StackTable;
  return *t;
}

constexpr Whole<int> kDepth{"depth", "a number of frames"};
constexpr Whole<int> kNativeDepth{"native_depth", "a number of frames"};

// -- native frames

struct Unwinding {
  Frame* frames = nullptr;
  int depth = 0;
  int count = 0;
};

_Unwind_Reason_Code note_frame(_Unwind_Context* context, void* argument) {
  Unwinding& walk = *static_cast<Unwinding*>(argument);
  const std::uintptr_t address = _Unwind_GetIP(context);
  if (address == 0 || walk.count == walk.depth) return _URC_END_OF_STACK;
  walk.frames[walk.count++] = {address, 0, Frame::Kind::native};
  return _URC_NO_REASON;
}

// Where a return address lies. The call is before it.
struct Place {
  const void* object = nullptr;  // the library or program, by where it was loaded
  const void* symbol = nullptr;
  std::string file, function;
};

Place place_of(std::uintptr_t address) {
  Place place;
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(address - 1), &info) == 0) {
    place.file = "?";
    place.function = pool::hex(address);
    return place;
  }
  place.object = info.dli_fbase;
  place.symbol = info.dli_saddr;
  place.file = info.dli_fname != nullptr ? info.dli_fname : "?";
  const std::uintptr_t base =
      reinterpret_cast<std::uintptr_t>(info.dli_sname != nullptr ? info.dli_saddr : info.dli_fbase);
  std::string name = info.dli_sname != nullptr ? info.dli_sname : "";
  int status = 0;
  if (char* plain = name.empty() ? nullptr : abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status)) {
    name = plain;
    std::free(plain);
  }
  place.function = name + "+" + pool::hex(address - base);
  return place;
}

// -- in words

constexpr const char* kNoText = "?";  // a file name that is no text

std::string text_of(PyObject* object) {
  Py_ssize_t size = 0;
  const char* words = PyUnicode_AsUTF8AndSize(object, &size);
  if (words != nullptr) return {words, static_cast<std::size_t>(size)};
  PyErr_Clear();
  return kNoText;
}

debug::SourceFrame in_words(const Frame& frame) {
  PyCodeObject* code = reinterpret_cast<PyCodeObject*>(frame.what);
  return {text_of(code->co_filename), PyCode_Addr2Line(code, frame.instruction), text_of(code->co_qualname)};
}

// Python and native frames in the order of the calls. A native frame of the interpreter's loop stands for the Python
// frames that it runs; the interpreter's other functions, and ours before the first frame of somebody else, are left
// out.
std::vector<debug::SourceFrame> merged(const std::vector<Frame>& frames) {
  std::vector<debug::SourceFrame> out;
  const auto native =
      std::find_if(frames.begin(), frames.end(), [](const Frame& f) { return f.kind == Frame::Kind::native; });
  auto python = frames.begin();
  const auto run = [&] {  // those that one entry of the interpreter runs
    while (python != native) {
      const bool last = python->kind == Frame::Kind::entry;
      out.push_back(in_words(*python++));
      if (last) break;
    }
  };
  if (native == frames.end()) {
    while (python != native) out.push_back(in_words(*python++));
    return out;
  }
  static const Place loop = place_of(reinterpret_cast<std::uintptr_t>(&_PyEval_EvalFrameDefault) + 1);
  static const Place ours = place_of(reinterpret_cast<std::uintptr_t>(&in_words) + 1);
  static const Place core = place_of(reinterpret_cast<std::uintptr_t>(&debug::set_capture) + 1);
  bool began = false;
  for (auto at = native; at != frames.end(); ++at) {
    const Place place = place_of(at->what);
    if (!began && (place.object == ours.object || place.object == core.object)) continue;
    began = true;
    if (place.symbol != nullptr && place.symbol == loop.symbol)
      run();
    else if (place.object != loop.object)
      out.push_back({place.file, 0, place.function});
  }
  while (python != native) out.push_back(in_words(*python++));  // beyond the native depth
  return out;
}

// In words, once for each stack; with the GIL.
const std::vector<debug::SourceFrame>& resolved(debug::StackId stack) {
  static auto* known = new std::unordered_map<debug::StackId, std::vector<debug::SourceFrame>>;
  const auto at = known->find(stack);
  if (at != known->end()) return at->second;
  return known->emplace(stack, merged(table().frames(stack))).first->second;
}

}  // namespace

debug::StackId capture_stack(int depth, int native_depth) noexcept {
  if (driver::ending() != driver::Ending::no) return 0;
  Frame frames[2 * kMaxDepth];
  std::size_t count = 0;
  // A library may have let go of the GIL before it allocates. The thread's own frames stand still all the same, and a
  // stack that is known costs no more; only a new one, whose code objects are kept, is interned with the GIL.
  PyThreadState* const state = depth > 0 ? PyGILState_GetThisThreadState() : nullptr;
  const bool without_gil = state != nullptr && !PyGILState_Check();
  if (state != nullptr && (walks_inside() || !without_gil)) {
    PythonFrame found[kMaxDepth];
    const int most = std::min(depth, kMaxDepth);
    count = static_cast<std::size_t>(walks_inside() ? walk_inside(state, found, most) : walk_public(found, most));
    for (std::size_t i = 0; i < count; ++i)
      frames[i] = {reinterpret_cast<std::uintptr_t>(found[i].code), found[i].instruction,
                   found[i].entry ? Frame::Kind::entry : Frame::Kind::python};
  }
  const bool needs_gil = without_gil && count != 0;
  if (native_depth > 0) {
    Unwinding walk{frames + count, std::min(native_depth, kMaxDepth)};
    _Unwind_Backtrace(note_frame, &walk);
    count += static_cast<std::size_t>(walk.count);
  }
  if (count == 0) return 0;
  if (needs_gil) {
    if (const debug::StackId id = table().known(frames, count); id != 0) return id;
    const WithGil gil;
    return table().intern(frames, count);
  }
  return table().intern(frames, count);
}

std::string site_of(debug::StackId stack) {
  const std::vector<debug::SourceFrame> frames = frames_of(stack);
  if (frames.empty() || frames[0].file == kNoText) return {};  // the number of the stack stays
  return frames[0].file + ":" + std::to_string(frames[0].line) + " in " + frames[0].function;
}

std::vector<debug::SourceFrame> frames_of(debug::StackId stack) noexcept try { return resolved(stack); } catch (...) {
  PyErr_Clear();
  return {};
}

void bind_stacks(nb::module_& m) {
  try_walk_inside();
  debug::set_capture(capture_stack);
  m.def(
      "capture_stack",
      [](Given<kDepth> depth, Given<kNativeDepth> native_depth) { return capture_stack(*depth, *native_depth); },
      parameter<kDepth>() = 32, parameter<kNativeDepth>() = 0);
  m.def(
      "resolve_stack",
      [](Given<kStack> stack) {
        nb::list out;
        for (const debug::SourceFrame& frame : frames_of(*stack)) {
          nb::object file =
              nb::steal(PyUnicode_DecodeUTF8(frame.file.data(), static_cast<Py_ssize_t>(frame.file.size()), "replace"));
          nb::object function = nb::steal(
              PyUnicode_DecodeUTF8(frame.function.data(), static_cast<Py_ssize_t>(frame.function.size()), "replace"));
          out.append(nb::make_tuple(file, frame.line, function));
        }
        return out;
      },
      parameter<kStack>());
  // "interpreter": frames are walked inside it; "public": by the public functions.
  m.def("stack_walker", [] { return walks_inside() ? "interpreter" : "public"; });
  // The self-test on the stack at hand; from then on its answer holds.
  m.def("try_stack_walker", [] { return try_walk_inside(); });
}

}  // namespace streampool::python
