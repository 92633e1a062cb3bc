// NVTX ranges of the program as scopes, with a stand-in for what NVTX's headers keep: the tables through which a tool
// says where its functions are.
#include <array>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "debug/scopes.hpp"
#include "test.hpp"

extern "C" int InitializeInjectionNvtx2(const void* (*get_export_table)(std::uint32_t));

namespace {

using namespace streampool::debug;

using Function = void (*)();
std::array<Function, 16> g_core{}, g_core2{};
std::array<Function*, 16> g_core_table{}, g_core2_table{};

int module_table(int module, Function*** table, unsigned* size) {
  auto& functions = module == 1 ? g_core : g_core2;
  auto& entries = module == 1 ? g_core_table : g_core2_table;
  if (module != 1 && module != 5) return 0;
  for (std::size_t i = 1; i < functions.size(); ++i) entries[i] = &functions[i];
  *table = entries.data();
  *size = static_cast<unsigned>(entries.size());
  return 1;
}

struct Callbacks {
  std::size_t size = sizeof(Callbacks);
  int (*get)(int, Function***, unsigned*) = module_table;
};

const void* export_table(std::uint32_t id) {
  static const Callbacks callbacks;
  return id == 1 ? &callbacks : nullptr;
}

struct Attributes {
  std::uint16_t version = 3, size = 48;
  std::uint32_t category = 0;
  std::int32_t color_type = 0;
  std::uint32_t color = 0;
  std::int32_t payload_type = 0, reserved = 0;
  std::uint64_t payload = 0;
  std::int32_t message_type = 1;
  const void* message = nullptr;
};

template <typename Signature>
Signature* core(std::size_t slot) {
  return reinterpret_cast<Signature*>(g_core[slot]);
}
template <typename Signature>
Signature* core2(std::size_t slot) {
  return reinterpret_cast<Signature*>(g_core2[slot]);
}

std::vector<std::string> since(Moment moment) { return scopes_between(moment, now_moment(), 100); }

STREAMPOOL_TEST("NVTX ranges of every sort are scopes, by their names") {
  CHECK_EQ(InitializeInjectionNvtx2(export_table), 1);
  const Moment begin = now_moment();
  CHECK_EQ(core<int(const char*)>(9)("outer"), 0);
  CHECK_EQ(core<int(const wchar_t*)>(10)(L"wide"), 1);
  CHECK_EQ(core<int()>(11)(), 1);
  CHECK_EQ(core<int()>(11)(), 0);
  CHECK_EQ(core<int()>(11)(), -1);  // one too many
  Attributes attributes;
  attributes.message = "extended";
  const std::uint64_t range = core<std::uint64_t(const Attributes*)>(4)(&attributes);
  std::thread([&] { core<void(std::uint64_t)>(7)(range); }).join();   // ends on another thread
  static void* const domain = core2<void*(const char*)>(12)("mine");  // handles live for ever, as NVTX's do
  static void* const message = core2<void*(void*, const char*)>(10)(domain, "registered");
  attributes.message_type = 3;
  attributes.message = message;
  CHECK_EQ(core2<int(void*, const Attributes*)>(4)(domain, &attributes), 0);
  core<int(const char*)>(9)("inside");
  CHECK_EQ(core2<int(void*)>(5)(domain), 0);  // each domain nests by itself
  const Moment middle = now_moment();
  CHECK(since(begin) == (std::vector<std::string>{"outer", "wide", "extended", "registered", "inside"}));
  CHECK(since(middle) == (std::vector<std::string>{"inside"}));
  core<int()>(11)();
  CHECK(since(now_moment()).empty());
}

STREAMPOOL_TEST("a range without a message, and one of a kind that is not known, have a name all the same") {
  CHECK_EQ(InitializeInjectionNvtx2(export_table), 1);
  const Moment begin = now_moment();
  Attributes attributes;
  core<void(std::uint64_t)>(7)(core<std::uint64_t(const Attributes*)>(4)(&attributes));
  attributes.message_type = 99;
  attributes.message = "?";
  core<void(std::uint64_t)>(7)(core<std::uint64_t(const Attributes*)>(4)(&attributes));
  core<void(std::uint64_t)>(7)(core<std::uint64_t(const char*)>(5)(nullptr));
  CHECK(since(begin) == (std::vector<std::string>{"? (3 x)"}));
}

STREAMPOOL_TEST("where NVTX keeps no tables nothing is taken") {
  CHECK_EQ(InitializeInjectionNvtx2([](std::uint32_t) -> const void* { return nullptr; }), 0);
}

}  // namespace
