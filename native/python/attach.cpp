// What the adapters of streampool.attach need of the core: PyTorch's pools, and memory for callers that know no
// streams.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>

#include "arguments.hpp"
#include "attach/torch.hpp"
#include "attach/unordered.hpp"
#include "hooks.hpp"
#include "pool_objects.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

namespace torch = attach::torch;

constexpr Text kFamily{"family"};
constexpr Builtin<nb::dict> kOptions{"options", "a dict of options"};
constexpr Text kOptionValue{"an option's value"};
constexpr Whole<int> kDevice{"device", "a device's ordinal", 0, torch::kMaxDevices - 1};
constexpr Whole<driver::StreamHandle> kHandle{"stream", "a handle"};
constexpr Whole<> kPointer{"ptr", "an address"};
constexpr Instance<PyPool> kPool{"pool", "a Pool"};

debug::StackId stack_of(const pool::Core& core) {
  return core.debugging() ? capture_stack(core.options().stack_depth, core.options().native_depth) : 0;
}

struct PyUnordered {
  std::unique_ptr<attach::Unordered> memory;
  ~PyUnordered() {
    const WithoutGil release;
    memory.reset();
  }
};

}  // namespace

void bind_attach(nb::module_& m) {
  m.def(
      "torch_configure",
      [](Given<kFamily> family, Given<kName> name, Given<kOptions> options) {
        torch::Settings settings;
        settings.family = *family;
        settings.name = *name;
        for (auto [key, value] : *options)
          settings.options[std::string(convert(key, kOptionName))] = convert(value, kOptionValue);
        set_hooks(settings.hooks, std::make_shared<OomCallback>());
        // PyTorch's calls are no place for an exception of a signal's handler, and nobody sets a callback there.
        settings.hooks.interrupted = nullptr;
        settings.hooks.out_of_memory = nullptr;
        // Whoever makes a pool holds the lock for long.
        unlocked([&] { torch::configure(std::move(settings)); });
      },
      parameter<kFamily>(), parameter<kName>(), parameter<kOptions>(),
      "How PyTorch's pools are made from here on, on devices 'FAMILY:N'.");
  m.def(
      "torch_give_pool",
      [](Given<kDevice> device, Given<kPool> pool) {
        return unlocked([&] { return torch::give_pool(*device, pool->core); });
      },
      parameter<kDevice>(), parameter<kPool>(), "Serve a device from `pool`; False: it is served already.");
  m.def(
      "torch_served",
      [] {
        nb::list out;
        for (const torch::Served& served : unlocked([] { return torch::served(); })) out.append(served.device);
        return out;
      },
      "The devices on which PyTorch's memory is served.");
  m.def(
      "torch_add_stream",
      [](Given<kDevice> device, Given<kHandle> stream) {
        unlocked([&] { torch::add_lasting_stream(*device, *stream); });
      },
      parameter<kDevice>(), parameter<kHandle>(), "One of PyTorch's own streams, which live as long as the process.");
  m.def("torch_problems", [] {
    const torch::Problems problems = unlocked([] { return torch::problems(); });
    return nb::make_tuple(problems.count, problems.first);
  });
  m.def("torch_functions", [] {
    const auto address = [](auto* function) { return reinterpret_cast<std::uintptr_t>(function); };
    nb::dict out;
    out["init"] = address(&sp_torch_init);
    out["reset"] = address(&sp_torch_reset);
    out["memory_fraction"] = address(&sp_torch_memory_fraction);
    out["base_alloc"] = address(&sp_torch_base_alloc);
    out["record_stream"] = address(&sp_torch_record_stream);
    out["begin_allocate_to_pool"] = address(&sp_torch_begin_allocate_to_pool);
    out["end_allocate_to_pool"] = address(&sp_torch_end_allocate_to_pool);
    out["release_pool"] = address(&sp_torch_release_pool);
    return out;
  });

  nb::class_<PyUnordered>(m, "UnorderedMemory", "Blocks of a pool for callers that know no streams.")
      .def(
          "__init__",
          [](PyUnordered* self, Given<kPool> pool) {
            pool::Failure failure;
            auto made = unlocked([&] { return attach::Unordered::create(pool->core, &failure); });
            if (!made) raise(failure);
            new (self) PyUnordered{std::move(made)};
          },
          parameter<kPool>())
      .def(
          "allocate",
          [](PyUnordered& self, Given<kSize> size) {
            attach::Unordered& memory = *self.memory;
            const debug::StackId stack = stack_of(memory.core());
            Address address = 0;
            guarded([&](pool::Failure* f) { return memory.allocate(*size, stack, &address, f); });
            return address;
          },
          parameter<kSize>(), "The address of memory that nothing queued touches any more.")
      .def(
          "free",
          [](PyUnordered& self, Given<kPointer> ptr) {
            if (frees_ignored()) return;
            attach::Unordered& memory = *self.memory;
            const debug::StackId stack = stack_of(memory.core());
            guarded([&](pool::Failure* f) { return memory.free(*ptr, stack, f); });
          },
          parameter<kPointer>(), "Free after all that is queued on the device by now. Waits for nothing.");
}

}  // namespace streampool::python
