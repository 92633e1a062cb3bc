// A stand-in for a tool that is attached through NVTX and takes memory regions: it writes down what it is told.
// Declares by itself what the tool and the headers agree on (nvToolsExtMem.h), so that a mistake of ours is seen.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

namespace {

using Function = void (*)();
struct Segment {
  std::size_t id, count;
  std::intptr_t* slots;
};
struct Module {
  std::uint16_t version, size, id, compat;
  std::size_t segments;
  Segment* segment;
  void *get_export, *info;
};
struct Range {
  std::size_t size;
  const void* at;
};
struct Heap {
  std::uint16_t compat, size;
  std::uint32_t reserved, usage, type;
  std::size_t desc_size;
  const Range* desc;
  std::uint32_t category, message_type;
  const char* message;
};
struct Register {
  std::uint16_t compat, size;
  std::uint32_t type;
  void* heap;
  std::size_t count, element_size;
  const Range* elements;
  void** handles;
};
struct Unregister {
  std::uint16_t compat, size;
  std::uint32_t ref_type;
  std::size_t count, element_size;
  const void* const* elements;
};
struct Name {
  std::uint32_t ref_type, name_type;
  const void* region;
  const char* name;
  std::uint32_t category, reserved;
};
struct Names {
  std::uint16_t compat, size;
  std::uint32_t reserved;
  std::size_t count, element_size;
  const Name* elements;
  std::size_t reserved_too;
};

struct Known {
  std::size_t size;
  std::string name;
};
std::map<std::uintptr_t, std::size_t> heaps;
std::map<std::uintptr_t, Known> regions;
int mistakes = 0;
int first_slot = 1;  // where the tool puts function 1: as headers of 2023 and later have it, or 0, as those of 2020
char our_domain = 0;

template <typename Desc>
void expect(const Desc* desc, bool also) {
  if (desc->compat != 0x0102 || desc->size != sizeof(Desc) || !also) ++mistakes;
}

void* heap_register(void* domain, const Heap* desc) {
  expect(desc, domain == &our_domain && desc->usage == 1 && desc->type == 1 && desc->desc_size == sizeof(Range));
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(desc->desc->at);
  // Memory that a heap had and that comes again was freed in between, with its regions.
  regions.erase(regions.lower_bound(at), regions.lower_bound(at + desc->desc->size));
  heaps[at] = desc->desc->size;
  return reinterpret_cast<void*>(at + 1);
}

// A tool hears of freed memory from the driver: being told as well, it reports the free.
void heap_unregister(void*, void*) { ++mistakes; }
void unused() { ++mistakes; }

void regions_register(void* domain, const Register* desc) {
  expect(desc, domain == &our_domain && desc->type == 1 && desc->count == 1 && desc->element_size == sizeof(Range));
  const std::uintptr_t heap = reinterpret_cast<std::uintptr_t>(desc->heap) - 1;
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(desc->elements->at);
  if (!heaps.contains(heap) || at < heap || at + desc->elements->size > heap + heaps[heap]) ++mistakes;
  if (!regions.emplace(at, Known{desc->elements->size, {}}).second) ++mistakes;
}

void regions_unregister(void* domain, const Unregister* desc) {
  expect(desc, domain == &our_domain && desc->ref_type == 1 && desc->count == 1 && desc->element_size == sizeof(void*));
  if (regions.erase(reinterpret_cast<std::uintptr_t>(desc->elements[0])) != 1) ++mistakes;
}

void regions_name(void*, const Names* desc) {
  expect(desc, desc->count == 1 && desc->element_size == sizeof(Name) && desc->elements->ref_type == 1 &&
                   desc->elements->name_type == 1);
  const auto at = regions.find(reinterpret_cast<std::uintptr_t>(desc->elements->region));
  if (at == regions.end())
    ++mistakes;
  else
    at->second.name = desc->elements->name;
}

}  // namespace

extern "C" {

int InitializeInjectionNvtxExtension(Module* module) {
  if (module->version != 3 || module->size != sizeof(Module) || module->id != 1 || module->compat != 0x0102 ||
      module->segments != 1 || module->segment->count < 8)
    return 0;
  std::intptr_t* slots = module->segment->slots + first_slot;
  slots[0] = reinterpret_cast<std::intptr_t>(heap_register);
  slots[1] = reinterpret_cast<std::intptr_t>(heap_unregister);
  slots[2] = reinterpret_cast<std::intptr_t>(unused);  // heap reset
  slots[3] = reinterpret_cast<std::intptr_t>(regions_register);
  slots[4] = reinterpret_cast<std::intptr_t>(unused);  // regions resize
  slots[5] = reinterpret_cast<std::intptr_t>(regions_unregister);
  slots[6] = reinterpret_cast<std::intptr_t>(regions_name);
  return 1;
}

int InitializeInjectionNvtx2(const void* (*get_export_table)(std::uint32_t)) {
  struct Callbacks {
    std::size_t size;
    int (*module_functions)(int, Function***, unsigned*);
  };
  const auto* callbacks = static_cast<const Callbacks*>(get_export_table(1));
  Function** table = nullptr;
  unsigned size = 0;
  constexpr int kCore2 = 5, kDomainCreate = 12;
  if (callbacks == nullptr || callbacks->size < sizeof(Callbacks) || get_export_table(2) != nullptr ||
      callbacks->module_functions(kCore2, &table, &size) == 0 || size <= kDomainCreate || table[0] != nullptr)
    return 0;
  void* (*create)(const char*) = [](const char* name) -> void* {
    if (std::strcmp(name, "streampool") != 0) ++mistakes;
    return &our_domain;
  };
  *table[kDomainCreate] = reinterpret_cast<Function>(create);
  return 1;
}

// What a test asks.
void nvtx_stub_count_from(int slot) { first_slot = slot; }
int nvtx_stub_mistakes() { return mistakes; }
std::size_t nvtx_stub_heaps() { return heaps.size(); }
// The size of the region at an address, ~0 where there is none; its name into `name`.
std::size_t nvtx_stub_region(std::uintptr_t at, char* name, std::size_t room) {
  const auto found = regions.find(at);
  if (found == regions.end()) return ~std::size_t{0};
  std::strncpy(name, found->second.name.c_str(), room);
  return found->second.size;
}
}
