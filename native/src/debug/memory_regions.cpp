#include "memory_regions.hpp"

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstdlib>

namespace streampool::debug {

namespace {

// From here on names follow NVTX 3 (nvToolsExtMem.h): what its headers and a tool agree on.
constexpr std::uint16_t kVersion = 3;
constexpr std::uint16_t kMemModule = 1;
constexpr std::uint16_t kMemCompatId = 0x0102;
constexpr std::size_t kSlots = 63;
constexpr std::intptr_t kDisabled = 1;  // 0: not known to the tool

// The number of a function is its slot in the headers of 2023 and later, which have none of number 0. In those of 2020,
// which the first tools were built with, it is one slot further down: `Functions::first` says which.
enum Slot : std::size_t { kHeapRegister = 1, kRegionsRegister = 4, kRegionsUnregister = 6, kRegionsName = 7 };

struct ModuleSegment {
  std::size_t id;
  std::size_t slot_count;
  std::intptr_t* slots;
};

struct ModuleInfo {
  std::uint16_t version, struct_size, module_id, compat_id;
  std::size_t segment_count;
  ModuleSegment* segments;
  std::intptr_t (*get_export)(std::uint32_t);
  const void* info;
};
using InitializeExtension = int (*)(ModuleInfo*);

// Some tools ask for it, and need nothing of it.
std::intptr_t no_export(std::uint32_t) { return 0; }

constexpr std::uint32_t kUsageSubAllocator = 1;
constexpr std::uint32_t kTypeVirtualAddress = 1;
constexpr std::uint32_t kRefPointer = 1;
constexpr std::uint32_t kMessageAscii = 1;

struct VirtualRange {
  std::size_t size;
  const void* pointer;
};

struct HeapDesc {
  std::uint16_t compat_id = kMemCompatId, struct_size = sizeof(HeapDesc);
  std::uint32_t reserved = 0, usage = kUsageSubAllocator, type = kTypeVirtualAddress;
  std::size_t desc_size = sizeof(VirtualRange);
  const void* desc = nullptr;
  std::uint32_t category = 0, message_type = 0;
  const void* message = nullptr;
};

struct RegionsRegister {
  std::uint16_t compat_id = kMemCompatId, struct_size = sizeof(RegionsRegister);
  std::uint32_t type = kTypeVirtualAddress;
  void* heap = nullptr;
  std::size_t count = 1, element_size = sizeof(VirtualRange);
  const void* elements = nullptr;
  void** handles = nullptr;
};

struct RegionsUnregister {
  std::uint16_t compat_id = kMemCompatId, struct_size = sizeof(RegionsUnregister);
  std::uint32_t ref_type = kRefPointer;
  std::size_t count = 1, element_size = sizeof(const void*);
  const void* const* elements = nullptr;
};

struct RegionName {
  std::uint32_t ref_type = kRefPointer, name_type = kMessageAscii;
  const void* region = nullptr;
  const char* name = nullptr;
  std::uint32_t category = 0, reserved = 0;
};

struct RegionsName {
  std::uint16_t compat_id = kMemCompatId, struct_size = sizeof(RegionsName);
  std::uint32_t reserved = 0;
  std::size_t count = 1, element_size = sizeof(RegionName);
  const RegionName* elements = nullptr;
  std::size_t reserved_too = 0;
};

// -- the core of NVTX, as far as a domain needs it ------------------------------------------------------------------
// A tool is given, for each module of functions, where it may put them; the headers then call what lies there.
using Function = void (*)();
using GetExportTable = const void* (*)(std::uint32_t);
using InitializeCore = int (*)(GetExportTable);

constexpr std::uint32_t kTableCallbacks = 1, kTableVersion = 3;
constexpr std::size_t kModules = 7, kFunctions = 17;
constexpr std::size_t kDomainModule = 5, kDomainCreate = 12, kInitialize = 15;

struct Module {
  std::array<Function, kFunctions> functions{};
  std::array<Function*, kFunctions> places{};  // the first is none
  Module() {
    for (std::size_t i = 1; i < kFunctions; ++i) places[i] = &functions[i];
  }
};
std::array<Module, kModules>& modules() {
  static auto* all = new std::array<Module, kModules>;  // a tool may keep the places for ever
  return *all;
}

int module_functions(int module, Function*** table, unsigned* size) {
  if (module <= 0 || static_cast<std::size_t>(module) >= kModules) return 0;
  if (size != nullptr) *size = kFunctions;
  if (table != nullptr) *table = modules()[static_cast<std::size_t>(module)].places.data();
  return 1;
}

void set_tool_version(std::uint32_t) {}

const void* export_table(std::uint32_t id) {
  static constexpr struct {
    std::size_t struct_size;
    int (*functions)(int, Function***, unsigned*);
  } kOfCallbacks{sizeof kOfCallbacks, module_functions};
  static constexpr struct {
    std::size_t struct_size;
    std::uint32_t version, reserved;
    void (*set_tool_version)(std::uint32_t);
  } kOfVersion{sizeof kOfVersion, kVersion, 0, set_tool_version};
  return id == kTableCallbacks ? static_cast<const void*>(&kOfCallbacks)
         : id == kTableVersion ? static_cast<const void*>(&kOfVersion)
                               : nullptr;
}

// A domain of ours in the tool's core; null where it has none, which stands for the default one.
void* make_domain(void* library) {
  const auto initialize = reinterpret_cast<InitializeCore>(dlsym(library, "InitializeInjectionNvtx2"));
  if (initialize == nullptr || initialize(export_table) == 0) return nullptr;
  const std::array<Function, kFunctions>& core = modules()[kDomainModule].functions;
  if (core[kInitialize] != nullptr) reinterpret_cast<void (*)(const void*)>(core[kInitialize])(nullptr);
  if (core[kDomainCreate] == nullptr) return nullptr;
  return reinterpret_cast<void* (*)(const char*)>(core[kDomainCreate])("streampool");
}

const void* pointer(Address address) { return reinterpret_cast<const void*>(address); }  // NOLINT

struct Tool {
  std::mutex mutex;
  bool asked = false;
  std::string why;
  std::shared_ptr<MemoryRegions> regions;
};
Tool& tool() {
  static Tool* t = new Tool;
  return *t;
}

constexpr const char* kVariable = "NVTX_INJECTION64_PATH";
void* const kRefused = reinterpret_cast<void*>(~std::uintptr_t{0});  // NOLINT: what older headers take for no heap

}  // namespace

// What the tool gave. The first argument of each is the domain.
struct MemoryRegions::Functions {
  std::array<std::intptr_t, kSlots + 1> slots{};
  void* domain = nullptr;

  // A tool that fills slot 0 counts from there.
  std::size_t first() const { return slots[0] != 0 ? 1 : 0; }
  template <typename Call>
  Call* at(Slot slot) const {
    const std::intptr_t function = slots[slot - first()];
    return function == 0 || function == kDisabled ? nullptr : reinterpret_cast<Call*>(function);
  }
  template <typename Desc>
  void call(Slot slot, const Desc& desc) const {
    if (const auto function = at<void(void*, const void*)>(slot)) function(domain, &desc);
  }
};

MemoryRegions::MemoryRegions(std::shared_ptr<const Functions> functions) : functions_(std::move(functions)) {}

std::shared_ptr<MemoryRegions> MemoryRegions::load(const std::string& path, std::string* why) {
  // Stays loaded: a tool is never unloaded under a program.
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* error = dlerror();
    *why = "the tool's library cannot be loaded: " + std::string(error != nullptr ? error : path);
    return nullptr;
  }
  const auto initialize = reinterpret_cast<InitializeExtension>(dlsym(library, "InitializeInjectionNvtxExtension"));
  if (initialize == nullptr) {
    *why = "the tool takes no extension of NVTX";
    return nullptr;
  }
  auto functions = std::make_shared<Functions>();
  ModuleSegment segment{1, kSlots, functions->slots.data()};
  ModuleInfo module{kVersion, sizeof(ModuleInfo), kMemModule, kMemCompatId, 1, &segment, no_export, nullptr};
  if (initialize(&module) == 0 || functions->at<void>(kHeapRegister) == nullptr ||
      functions->at<void>(kRegionsRegister) == nullptr) {
    *why = "the tool takes no memory regions (compute-sanitizer does with --nvtx=yes)";
    return nullptr;
  }
  functions->domain = make_domain(library);
  return std::shared_ptr<MemoryRegions>(new MemoryRegions(std::move(functions)));
}

std::shared_ptr<MemoryRegions> MemoryRegions::attached(std::string* why) {
  Tool& t = tool();
  const std::lock_guard lock(t.mutex);
  if (!t.asked) {
    t.asked = true;
    const char* path = std::getenv(kVariable);
    if (path == nullptr || *path == '\0')
      t.why = std::string("no tool is attached (") + kVariable + " is not set)";
    else
      t.regions = load(path, &t.why);
  }
  if (why != nullptr) *why = t.why;
  return t.regions;
}

bool MemoryRegions::is_sanitizer() {
  const char* path = std::getenv(kVariable);
  return path != nullptr && std::string(path).find("anitizer") != std::string::npos;
}

void MemoryRegions::attach(std::shared_ptr<MemoryRegions> regions) {
  Tool& t = tool();
  const std::lock_guard lock(t.mutex);
  t.asked = true;
  t.regions = std::move(regions);
}

void MemoryRegions::add_heap(Address begin, Bytes size) {
  const VirtualRange range{size, pointer(begin)};
  HeapDesc desc;
  desc.desc = &range;
  void* handle = functions_->at<void*(void*, const void*)>(kHeapRegister)(functions_->domain, &desc);
  if (handle == nullptr || handle == kRefused) return;  // then its blocks are not told either
  const std::lock_guard lock(mutex_);
  heaps_[begin] = {size, handle};
}

// The tool forgets a heap when the driver frees its memory; being told before, it would report that free.
void MemoryRegions::remove_heap(Address begin) {
  const std::lock_guard lock(mutex_);
  heaps_.erase(begin);
}

void MemoryRegions::add_region(Address begin, Bytes size, const std::string& name) {
  RegionsRegister desc;
  {
    const std::lock_guard lock(mutex_);
    auto at = heaps_.upper_bound(begin);
    if (at == heaps_.begin() || begin >= (--at)->first + at->second.first) return;
    desc.heap = at->second.second;
  }
  const VirtualRange range{size, pointer(begin)};
  desc.elements = &range;
  functions_->call(kRegionsRegister, desc);
  RegionName named;
  named.region = pointer(begin);
  named.name = name.c_str();
  RegionsName names;
  names.elements = &named;
  functions_->call(kRegionsName, names);
}

void MemoryRegions::remove_region(Address begin) {
  {
    const std::lock_guard lock(mutex_);
    auto at = heaps_.upper_bound(begin);
    if (at == heaps_.begin() || begin >= (--at)->first + at->second.first) return;  // it was never told
  }
  const void* region = pointer(begin);
  RegionsUnregister desc;
  desc.elements = &region;
  functions_->call(kRegionsUnregister, desc);
}

}  // namespace streampool::debug
