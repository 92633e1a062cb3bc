#include "capi_faults.hpp"

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "capi_watch.hpp"
#include "debug/fault.hpp"
#include "pool/errors.hpp"

namespace streampool::capi {
namespace {

using debug::Fault;
using pool::Core;
using OnFault = pool::Options::OnFault;

// What happened, in one line.
std::string line_of(const Fault& fault) {
  const std::string word(debug::fault_word(fault.kind));
  std::string text = word + ", " + std::string(debug::fault_meaning(fault.kind)) + ", at " + pool::hex(fault.address);
  if (fault.bad_bytes != 0) text += " to " + pool::hex(fault.last);
  if (fault.block)
    text += ", block of " + std::to_string(fault.block->size) + " bytes at " + pool::hex(fault.block->address);
  if (fault.count > 1) text += ", " + std::to_string(fault.count) + " times";
  return text + " (docs/faults/" + word + ".md)";
}

std::string error_of(const std::vector<Fault>& faults) {
  const std::string many = std::to_string(faults.size()) + " faults were found; the first: ";
  return (faults.size() == 1 ? "1 fault was found: " : many) + line_of(faults.front());
}

void call_back(sp_pool* handle, sp_fault_function function, void* user, const std::vector<Fault>& faults) {
  for (const Fault& fault : faults) {
    const std::string line = line_of(fault);
    sp_fault_t told{};
    told.struct_size = sizeof told;
    told.kind = debug::fault_word(fault.kind).data();
    told.text = line.c_str();
    told.note = fault.note.c_str();
    told.number = fault.number;
    told.count = fault.count;
    told.first = fault.address;
    told.last = fault.last;
    told.bad_bytes = fault.bad_bytes;
    if (fault.block) {
      told.block = fault.block->address;
      told.block_size = fault.block->size;
      told.block_serial = fault.block->serial;
    }
    function(handle, &told, user);
  }
}

[[noreturn]] void abort_for(Core& core, const std::vector<Fault>& faults) {
  for (const Fault& fault : faults) {
    std::fprintf(stderr, "streampool: pool '%s' on %s: %s\n", core.name().c_str(),
                 std::string(core.driver().name()).c_str(), line_of(fault).c_str());
    if (!fault.note.empty()) std::fprintf(stderr, "streampool: note: %s\n", fault.note.c_str());
  }
  std::fputs("streampool: aborting (on_fault=abort)\n", stderr);
  std::fflush(stderr);
  std::abort();
}

// Those whose function this thread is in.
std::vector<const FaultTeller*>& telling() {
  thread_local std::vector<const FaultTeller*> tellers;
  return tellers;
}

bool is_telling(const FaultTeller* teller) {
  for (const FaultTeller* one : telling())
    if (one == teller) return true;
  return false;
}

// For as long as this thread is in a teller's function, which may throw (it is C++, or a Python extension's).
class Telling {
 public:
  explicit Telling(const FaultTeller* teller) { telling().push_back(teller); }
  ~Telling() { telling().pop_back(); }
  Telling(const Telling&) = delete;
  Telling& operator=(const Telling&) = delete;
};

}  // namespace

void FaultTeller::call(sp_fault_function function, void* user) {
  const std::lock_guard lock(mutex_);
  function_ = function;
  user_ = user;
}

std::optional<std::string> FaultTeller::tell(sp_pool* handle, Core& core) {
  if (!core.must_tell() || is_telling(this)) return std::nullopt;
  const OnFault what = core.options().on_fault;
  sp_fault_function function = nullptr;
  void* user = nullptr;
  if (what == OnFault::callback) {
    const std::lock_guard lock(mutex_);
    function = function_;
    user = user_;
    if (function == nullptr) return std::nullopt;
  }
  const std::vector<Fault> faults = core.take_faults();
  if (faults.empty()) return std::nullopt;
  note_told(core, faults);
  if (what == OnFault::raise) return error_of(faults);
  if (what == OnFault::abort) abort_for(core, faults);
  const Telling inside(this);
  call_back(handle, function, user, faults);
  return std::nullopt;
}

}  // namespace streampool::capi
