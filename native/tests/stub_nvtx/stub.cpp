// A stand-in for a tool that is attached through NVTX and takes memory regions: it writes down what it is told.
// Declares by itself what the tool and the headers agree on (nvToolsExtMem.h), so that a mistake of ours is seen.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>

namespace {

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

template <typename Desc>
void expect(const Desc* desc, bool also) {
  if (desc->compat != 0x0102 || desc->size != sizeof(Desc) || !also) ++mistakes;
}

void* heap_register(void* domain, const Heap* desc) {
  expect(desc, domain == nullptr && desc->usage == 1 && desc->type == 1 && desc->desc_size == sizeof(Range));
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(desc->desc->at);
  if (!heaps.emplace(at, desc->desc->size).second) ++mistakes;
  return reinterpret_cast<void*>(at + 1);
}

void heap_unregister(void*, void* handle) {
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(handle) - 1;
  const auto at = heaps.find(begin);
  if (at == heaps.end()) {
    ++mistakes;
    return;
  }
  regions.erase(regions.lower_bound(begin), regions.lower_bound(begin + at->second));
  heaps.erase(at);
}

void regions_register(void*, const Register* desc) {
  expect(desc, desc->type == 1 && desc->count == 1 && desc->element_size == sizeof(Range));
  const std::uintptr_t heap = reinterpret_cast<std::uintptr_t>(desc->heap) - 1;
  const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(desc->elements->at);
  if (!heaps.contains(heap) || at < heap || at + desc->elements->size > heap + heaps[heap]) ++mistakes;
  if (!regions.emplace(at, Known{desc->elements->size, {}}).second) ++mistakes;
}

void regions_unregister(void*, const Unregister* desc) {
  expect(desc, desc->ref_type == 1 && desc->count == 1 && desc->element_size == sizeof(void*));
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
  std::intptr_t* slots = module->segment->slots;
  slots[1] = reinterpret_cast<std::intptr_t>(heap_register);
  slots[2] = reinterpret_cast<std::intptr_t>(heap_unregister);
  slots[4] = reinterpret_cast<std::intptr_t>(regions_register);
  slots[6] = reinterpret_cast<std::intptr_t>(regions_unregister);
  slots[7] = reinterpret_cast<std::intptr_t>(regions_name);
  return 1;
}

// What a test asks.
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
