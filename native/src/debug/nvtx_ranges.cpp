// The program's own NVTX ranges as scopes (scopes.hpp): NVTX loads the library that NVTX_INJECTION64_PATH names and
// calls its entry, which is here, when the program first uses NVTX. So ranges that libraries and frameworks set anyway
// name a fault's window, where no other tool is attached.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "scopes.hpp"

namespace streampool::debug {

namespace {

// From here on names follow NVTX 3 (nvToolsExt.h, nvtxTypes.h).
using Function = void (*)();
using FunctionTable = Function**;  // each entry says where a function of the headers is looked up; 0 is none

struct ExportTableCallbacks {
  std::size_t struct_size;
  int (*get_module_function_table)(int module, FunctionTable* table, unsigned* size);
};

constexpr std::uint32_t kCallbacks = 1;
constexpr int kCore = 1, kCore2 = 5;

struct EventAttributes {
  std::uint16_t version, size;
  std::uint32_t category;
  std::int32_t color_type;
  std::uint32_t color;
  std::int32_t payload_type, reserved;
  std::uint64_t payload;
  std::int32_t message_type;
  const void* message;
};
constexpr std::int32_t kAscii = 1, kUnicode = 2, kRegistered = 3;

// Wide text as far as it is ASCII.
std::string narrow(const wchar_t* text) {
  std::string out;
  for (; text != nullptr && *text != 0; ++text) out += *text < 0x80 ? static_cast<char>(*text) : '?';
  return out;
}

std::string message_of(const EventAttributes* attributes) {
  if (attributes == nullptr || attributes->message == nullptr) return "?";
  switch (attributes->message_type) {
    case kAscii: return static_cast<const char*>(attributes->message);
    case kUnicode: return narrow(static_cast<const wchar_t*>(attributes->message));
    case kRegistered: return *static_cast<const std::string*>(attributes->message);
    default: return "?";
  }
}

// Pushed ranges of this thread. Each domain nests by itself.
struct Pushed {
  const void* domain;
  std::uint64_t range;
};
std::vector<Pushed>& pushed() {
  thread_local std::vector<Pushed> ranges;
  return ranges;
}

int depth_of(const void* domain) {
  return static_cast<int>(
      std::count_if(pushed().begin(), pushed().end(), [&](const Pushed& one) { return one.domain == domain; }));
}

int push(const void* domain, std::string_view name) {
  pushed().push_back({domain, enter_scope(name)});
  return depth_of(domain) - 1;
}

int pop(const void* domain) {
  const auto last =
      std::find_if(pushed().rbegin(), pushed().rend(), [&](const Pushed& one) { return one.domain == domain; });
  if (last == pushed().rend()) return -1;
  leave_scope(last->range);
  pushed().erase(std::next(last).base());
  return depth_of(domain);
}

std::uint64_t start_ex(const EventAttributes* attributes) { return enter_scope(message_of(attributes)); }
std::uint64_t start_a(const char* message) { return enter_scope(message != nullptr ? message : "?"); }
std::uint64_t start_w(const wchar_t* message) { return enter_scope(narrow(message)); }
void end(std::uint64_t range) { leave_scope(range); }
int push_ex(const EventAttributes* attributes) { return push(nullptr, message_of(attributes)); }
int push_a(const char* message) { return push(nullptr, message != nullptr ? message : "?"); }
int push_w(const wchar_t* message) { return push(nullptr, narrow(message)); }
int pop_default() { return pop(nullptr); }
std::uint64_t domain_start(void*, const EventAttributes* attributes) { return start_ex(attributes); }
void domain_end(void*, std::uint64_t range) { leave_scope(range); }
int domain_push(void* domain, const EventAttributes* attributes) { return push(domain, message_of(attributes)); }
int domain_pop(void* domain) { return pop(domain); }
// Handles are never freed: NVTX says nowhere when their last use was.
void* domain_create(const char*) { return new char; }
void* register_a(void*, const char* text) { return new std::string(text != nullptr ? text : "?"); }
void* register_w(void*, const wchar_t* text) { return new std::string(narrow(text)); }

template <typename Pointer>
void set(FunctionTable table, unsigned size, unsigned slot, Pointer function) {
  if (slot < size && table[slot] != nullptr) *table[slot] = reinterpret_cast<Function>(function);
}

}  // namespace

// Called by NVTX, with what tells where its headers look their functions up. 0: nothing was taken.
int take_nvtx_ranges(const void* (*get_export_table)(std::uint32_t)) noexcept {
  const auto* callbacks = static_cast<const ExportTableCallbacks*>(get_export_table(kCallbacks));
  if (callbacks == nullptr || callbacks->struct_size < sizeof(ExportTableCallbacks)) return 0;
  FunctionTable core = nullptr, core2 = nullptr;
  unsigned size = 0, size2 = 0;
  if (callbacks->get_module_function_table(kCore, &core, &size) == 0 ||
      callbacks->get_module_function_table(kCore2, &core2, &size2) == 0)
    return 0;
  set(core, size, 4, start_ex);
  set(core, size, 5, start_a);
  set(core, size, 6, start_w);
  set(core, size, 7, end);
  set(core, size, 8, push_ex);
  set(core, size, 9, push_a);
  set(core, size, 10, push_w);
  set(core, size, 11, pop_default);
  set(core2, size2, 2, domain_start);
  set(core2, size2, 3, domain_end);
  set(core2, size2, 4, domain_push);
  set(core2, size2, 5, domain_pop);
  set(core2, size2, 10, register_a);
  set(core2, size2, 11, register_w);
  set(core2, size2, 12, domain_create);
  return 1;
}

}  // namespace streampool::debug

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    const void* (*get_export_table)(std::uint32_t)) {
  return streampool::debug::take_nvtx_ranges(get_export_table);
}
