// Pool. The GIL is held for what cannot block (a slot on a lasting stream) and released for everything else.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "arguments.hpp"
#include "attach/torch.hpp"
#include "capi_watch.hpp"
#include "facts.hpp"
#include "pool_objects.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

using pool::Core;
using pool::Errc;
using pool::Failure;

constexpr Instance<PyPool> kSelf{"self", "a Pool that was initialised"};
constexpr Whole<> kAlignment{"alignment", "a power of two", 1, kMaxAlignment};
constexpr Whole<> kPointer{"ptr", "an address"};
constexpr OptionalFlag kStreamOrdered{"stream_ordered"};
constexpr OptionalText kTag{"tag"};
constexpr OptionalText kMode{"mode"};
constexpr Size kReserve{"size"};
constexpr Size kKeepBytes{"keep_bytes"};
constexpr Seconds kTimeout{"timeout"};
constexpr Whole<> kMost{"most", "a number of pieces, at most 1000", 0, 1000};
constexpr Callable kCallback{"callback"};

constexpr Instance<driver::Driver, std::shared_ptr<driver::Driver>> kDriver{"driver", "a device's driver"};
constexpr Choice<Kind>::Word kKinds[] = {
    {"device", Kind::device}, {"pinned", Kind::pinned}, {"managed", Kind::managed}};
constexpr Choice<Kind> kKind{"kind", "'device', 'pinned' or 'managed'", kKinds};
constexpr Builtin<nb::dict> kOptions{"options", "a dict of options"};
constexpr Whole<int> kTorchDevice{"torch_device", "a device's ordinal"};
constexpr Text kOptionValue{"an option's value"};

constexpr int kSampledDepth = 32;  // Python frames of a sampled allocation

// on_fault=raise|abort|callback: at the pool's next call after a finding arrived, before that call does anything.
void tell_faults(PyPool& self) {
  if (!self.core->must_tell()) return;
  const nb::object hook = nb::module_::import_("streampool._core").attr("_fault_hook");
  // The Python layer formats and acts; nothing to do where it did not ask.
  if (!hook.is_none()) hook(nb::cast(&self, nb::rv_policy::reference));
}

// A free that failed is an error of its own. Whoever asked to be called, or to stop, is told of it here and not later.
[[noreturn]] void raise_told(PyPool& self, Failure& failure) {
  using OnFault = pool::Options::OnFault;
  if (const OnFault what = self.core->options().on_fault; what == OnFault::abort || what == OnFault::callback)
    tell_faults(self);
  raise(failure);
}

pool::BlockRef allocate(PyPool& self, Bytes size, Bytes alignment, nb::handle stream, bool stream_ordered, bool raw,
                        std::string_view tag, bool owned = false) {
  tell_faults(self);
  Core& core = *self.core;
  pool::AllocRequest request;
  request.size = size;
  request.alignment = alignment;
  request.stream = stream_handle(stream, core, "allocate");
  request.stream_ordered = stream_ordered;
  request.raw = raw;
  request.owned = owned;
  request.tag = tag;
  if (self.stack_depth + self.native_depth != 0) request.stack = capture_stack(self.stack_depth, self.native_depth);
  pool::BlockRef block;
  if (core.try_allocate(request, &block)) return block;
  if (core.sample_is_due(size)) {
    request.sample = pool::AllocRequest::Sample::yes;
    request.stack = capture_stack(kSampledDepth);
  } else {
    request.sample = pool::AllocRequest::Sample::no;
  }
  Failure failure;
  if (unlocked([&] { return core.allocate(request, &block, &failure); }) != Errc::ok) raise(failure);
  return block;
}

void free_raw(PyPool& self, Given<kPointer> pointer, nb::handle stream) {
  if (frees_ignored()) return;
  tell_faults(self);
  pool::FreeRequest request;
  if (!stream.is_none()) request.stream = stream_handle(stream, *self.core, "free_raw");
  if (self.core->debugging()) request.stack = capture_stack(self.stack_depth, self.native_depth);
  if (self.core->try_free(*pointer, request)) return;
  Failure failure;
  if (unlocked([&] { return self.core->free(*pointer, request, &failure); }) != Errc::ok) raise_told(self, failure);
}

void free_raw_sized(PyPool& self, Given<kPointer> pointer, Given<kSize> size, nb::handle stream) {
  if (frees_ignored()) return;
  tell_faults(self);
  pool::FreeRequest request;
  if (!stream.is_none()) request.stream = stream_handle(stream, *self.core, "free_raw_sized");
  request.size = *size;
  if (self.core->debugging()) request.stack = capture_stack(self.stack_depth, self.native_depth);
  Failure failure;
  if (unlocked([&] { return self.core->free(*pointer, request, &failure); }) != Errc::ok) raise_told(self, failure);
}

// The pool that serves PyTorch on a device, as an object.
PyPool pool_of_torch(int device, nb::dict options) {
  for (const attach::torch::Served& served : unlocked([] { return attach::torch::served(); })) {
    if (served.device != device) continue;
    PyPool self;
    self.core = served.core;
    self.stack_depth = self.core->options().stack_depth;
    self.native_depth = self.core->options().native_depth;
    self.options = std::move(options);
    self.oom_callback = std::make_shared<OomCallback>();
    return self;
  }
  throw nb::value_error(("PyTorch has no memory from us on device " + std::to_string(device)).c_str());
}

PyPool make_pool(std::shared_ptr<driver::Driver> driver, Kind kind, std::string_view name, nb::dict options) {
  pool::OptionMap map;
  for (auto [key, value] : options) map[std::string(convert(key, kOptionName))] = convert(value, kOptionValue);
  pool::Options parsed;
  std::string error;
  if (!pool::to_options(map, &parsed, &error)) throw nb::value_error(error.c_str());
  PyPool self;
  Failure failure;
  self.core = unlocked([&] { return Core::create(std::move(driver), kind, std::string(name), parsed, &failure); });
  if (!self.core) raise(failure);
  self.stack_depth = parsed.stack_depth;
  self.native_depth = parsed.native_depth;
  self.options = std::move(options);
  self.oom_callback = std::make_shared<OomCallback>();
  set_hooks(self.core->hooks(), self.oom_callback);
  return self;
}

nb::list faults_list(const std::vector<debug::Fault>& faults) {
  nb::list out;
  for (const debug::Fault& fault : faults) out.append(fault_dict(fault));
  return out;
}

nb::list live_blocks_list(const std::vector<debug::BlockFacts>& blocks) {
  nb::list out;
  for (const debug::BlockFacts& block : blocks) out.append(live_block_dict(block));
  return out;
}

nb::dict options_dict(const pool::OptionMap& options) {
  nb::dict out;
  for (const auto& [name, value] : options) out[name.c_str()] = value;
  return out;
}

nb::list c_pools() {
  nb::list out;
  for (capi::Watched& one : unlocked([] { return capi::watched_pools(); })) {
    nb::object found = nb::none();
    if (one.core != nullptr) {
      PyPool pool;
      pool.core = std::move(one.core);
      pool.stack_depth = pool.core->options().stack_depth;
      pool.native_depth = pool.core->options().native_depth;
      pool.options = options_dict(one.options);
      pool.oom_callback = std::make_shared<OomCallback>();
      found = nb::cast(std::move(pool));
    }
    out.append(nb::make_tuple(one.number, found));
  }
  return out;
}

nb::list take_told_c_faults() {
  nb::list out;
  for (const auto& [number, faults] : unlocked([] { return capi::take_told(); }))
    out.append(nb::make_tuple(number, faults_list(faults)));
  return out;
}

nb::list take_ended_c_pools() {
  nb::list out;
  for (const capi::Ended& one : unlocked([] { return capi::take_ended(); })) {
    nb::dict d;
    d["number"] = one.number;
    d["pools"] = one.pools;
    d["not_kept"] = one.not_kept;
    d["name"] = one.name;
    d["device"] = one.device;
    d["kind"] = std::string(kind_name(one.kind));
    d["options"] = options_dict(one.options);
    d["faults"] = faults_list(one.faults);
    d["live_blocks"] = live_blocks_list(one.live_blocks);
    d["debug_totals"] = totals_dict(one.totals, one.pages);
    d["stats"] = stats_dict(one.stats);
    d["ended_at"] = one.at;
    out.append(d);
  }
  return out;
}

}  // namespace

void bind_pool(nb::module_& m) {
  m.attr("_fault_hook") = nb::none();
  m.def(
      "watch_c_pools", [](Given<kMode> mode) { capi::watch_pools(std::string(mode->value_or(""))); },
      parameter<kMode>(),
      "Know pools that are made through the C ABI, and what is found in them; in `mode`, if one is given.");
  m.def("forget_c_pools", [] { unlocked([] { capi::forget_pools(); }); });
  m.def("c_pools", &c_pools,
        "(number, pool); the pool is None where it was destroyed and left more than counts to take_ended_c_pools().");
  m.def("take_told_c_faults", &take_told_c_faults,
        "(number, faults) of pools that live: those that the program was told of (option on_fault).");
  m.def("take_ended_c_pools", &take_ended_c_pools,
        "What destroyed ones left; those with nothing to tell are counted together, under number 0.");
  nb::class_<PyPool>(m, "Pool", nb::dynamic_attr(), nb::is_weak_referenceable(),
                     "A stream-ordered memory pool. Use streampool.Pool.")
      .def(
          "__init__",
          [](PyPool* self, Given<kTorchDevice> device, Given<kOptions> options) {
            new (self) PyPool(pool_of_torch(*device, *options));
          },
          nb::kw_only(), parameter<kTorchDevice>(), parameter<kOptions>())
      .def(
          "__init__",
          [](PyPool* self, Given<kDriver> driver, Given<kKind> kind, Given<kName> name, Given<kOptions> options) {
            new (self) PyPool(make_pool(*driver, *kind, *name, *options));
          },
          parameter<kDriver>(), nb::kw_only(), parameter<kKind>(), parameter<kName>(), parameter<kOptions>())
      .def_prop_ro("name", [](const PyPool& p) { return p.core->name(); })
      .def_prop_ro("kind", [](const PyPool& p) { return std::string(kind_name(p.core->kind())); })
      .def_prop_ro("driver", [](const PyPool& p) { return p.core->shared_driver(); })
      .def_prop_ro("options", [](const PyPool& p) { return nb::dict(p.options); })
      .def_prop_ro("is_closed", [](const PyPool& p) { return p.core->closed(); })
      .def(
          "allocate",
          [](nb::handle self, Given<kSize> size, nb::object stream, Given<kAlignment> alignment,
             Given<kStreamOrdered> stream_ordered, Given<kTag> tag) {
            PyPool& p = convert(self, kSelf);
            stream = resolve_current(stream, *p.core);
            const pool::BlockRef block =
                allocate(p, *size, *alignment, stream, stream_ordered->value_or(false), false, tag->value_or(""));
            nb::object buffer = nb::inst_alloc(nb::type<PyBuffer>());
            PyBuffer* b = nb::inst_ptr<PyBuffer>(buffer);
            new (b) PyBuffer{p.core, block, *size, false, 0, nb::borrow(self), stream, {}};
            nb::inst_mark_ready(buffer);
            return buffer;
          },
          parameter<kSize>(), nb::kw_only(), nb::arg("stream").none() = nb::none(), parameter<kAlignment>() = 256,
          parameter<kStreamOrdered>() = nb::none(), parameter<kTag>() = nb::none(),
          "Allocate `size` bytes on `stream`. Raises OutOfMemoryError, StreamError, PoolClosedError, ValueError, "
          "TypeError.")
      .def(
          "allocate_raw",
          [](PyPool& p, Given<kSize> size, nb::handle stream, Given<kAlignment> alignment) {
            return allocate(p, *size, *alignment, stream, false, true, {}).address;
          },
          parameter<kSize>(), nb::kw_only(), nb::arg("stream").none() = nb::none(), parameter<kAlignment>() = 256,
          "As allocate, but gives the address; free it with free_raw.")
      .def(
          "allocate_owned",
          [](PyPool& p, Given<kSize> size, nb::handle stream, Given<kAlignment> alignment) {
            return allocate(p, *size, *alignment, stream, false, true, {}, true).address;
          },
          parameter<kSize>(), nb::kw_only(), nb::arg("stream").none() = nb::none(), parameter<kAlignment>() = 256,
          "As allocate_raw, for an object of another library's that owns it and frees it when it goes.")
      .def("free_raw", &free_raw, parameter<kPointer>(), nb::kw_only(), nb::arg("stream").none() = nb::none(),
           "Free a block by address, on `stream`; None: on the block's own. Raises InvalidFreeError, StreamError.")
      .def("free_raw_sized", &free_raw_sized, parameter<kPointer>(), parameter<kSize>(), nb::kw_only(),
           nb::arg("stream").none() = nb::none(),
           "As free_raw, for callers that keep the size they asked for: another size raises SizeMismatchError, and "
           "changes nothing.")
      .def(
          "record_stream_raw",
          [](PyPool& p, Given<kPointer> pointer, nb::handle stream) {
            const driver::StreamHandle handle = named_stream_handle(stream, *p.core, "record_stream", true);
            guarded([&](Failure* f) { return p.core->record_stream(*pointer, handle, f); });
          },
          parameter<kPointer>(), nb::arg("stream").none())
      .def(
          "record_event_raw",
          [](PyPool& p, Given<kPointer> pointer, nb::handle event) {
            const driver::EventHandle handle = event_handle(event);
            guarded([&](Failure* f) { return p.core->record_event(*pointer, handle, f); });
          },
          parameter<kPointer>(), nb::arg("event").none())
      .def(
          "register_stream",
          [](PyPool& p, nb::handle stream) {
            const driver::StreamHandle handle = named_stream_handle(stream, *p.core, "register_stream", true);
            guarded([&](Failure* f) { return p.core->register_stream(handle, f); });
          },
          nb::arg("stream").none())
      .def(
          "forget_stream",
          [](PyPool& p, nb::handle stream) {
            const driver::StreamHandle handle = named_stream_handle(stream, *p.core, "forget_stream", true);
            guarded([&](Failure* f) { return p.core->forget_stream(handle, f); });
          },
          nb::arg("stream").none())
      .def(
          "begin_capturing",
          [](PyPool& p, nb::handle stream) {
            const driver::StreamHandle handle = named_stream_handle(stream, *p.core, "begin_capturing", true);
            guarded([&](Failure* f) { return p.core->begin_capture(handle, f); });
          },
          nb::arg("stream").none())
      .def(
          "end_capturing",
          [](PyPool& p, nb::handle stream) {
            must_not_be_forked();
            // A stream that was closed meanwhile ends its capture too, or the pool would see it open for ever.
            must_look_like_a_stream(stream);
            driver::StreamHandle handle = 0;
            std::exception_ptr interrupt;
            try {
              handle = stream_handle(stream, *p.core, "end_capturing", true);
            } catch (const nb::python_error& error) {
              // Ctrl-C, or the program's end: for the caller, when the capture is known to be over.
              if (!error.matches(PyExc_Exception)) interrupt = std::current_exception();
            } catch (const std::exception&) {
            }
            guarded([&](Failure* f) { return p.core->end_capture(handle, f); });
            if (interrupt) std::rethrow_exception(interrupt);
          },
          nb::arg("stream").none())
      .def(
          "reserve",
          [](PyPool& p, Given<kReserve> size) {
            Bytes reserved = 0;
            guarded([&](Failure* f) { return p.core->reserve(*size, &reserved, f); });
            return reserved;
          },
          parameter<kReserve>(),
          "Take memory from the driver in advance, up to `size` bytes in all; gives the bytes reserved.")
      .def(
          "trim",
          [](PyPool& p, Given<kKeepBytes> keep) {
            must_not_be_forked();
            const pool::TrimResult r = unlocked([&] { return p.core->trim(*keep); });
            check_interrupt();
            nb::dict d;
            d["released"] = r.released;
            d["pinned_by_live"] = r.pinned_by_live;
            d["pending"] = r.pending;
            d["reserved"] = r.reserved;
            return d;
          },
          parameter<kKeepBytes>() = 0)
      .def("stats",
           [](PyPool& p) {
             must_not_be_forked();
             return stats_dict(unlocked([&] { return p.core->stats(); }));
           })
      .def("reset_peaks",
           [](PyPool& p) {
             must_not_be_forked();
             unlocked([&] { p.core->reset_peaks(); });
           })
      .def(
          "check",
          [](PyPool& p, Given<kTimeout> timeout) {
            must_not_be_forked();
            const pool::CheckReport r = unlocked([&] { return p.core->check(*timeout); });
            check_interrupt();
            if (r.errc == Errc::driver) raise_driver_error(r.text);
            nb::dict d;
            d["checked_blocks"] = r.result.checked_blocks;
            d["checked_bytes"] = r.result.checked_bytes;
            d["faults"] = r.result.faults;
            nb::list skipped;
            for (const debug::BlockFacts& f : r.result.not_checked) skipped.append(facts_dict(f));
            d["not_checked"] = skipped;
            return d;
          },
          parameter<kTimeout>() = 10.0)
      .def("take_faults",
           [](PyPool& p) {
             must_not_be_forked();
             return faults_list(unlocked([&] { return p.core->take_faults(); }));
           })
      .def("live_blocks",
           [](PyPool& p) {
             must_not_be_forked();
             return live_blocks_list(unlocked([&] { return p.core->live_blocks(); }));
           })
      .def(
          "holders",
          [](PyPool& p, Given<kByTag> by_tag) {
            must_not_be_forked();
            return holders_list(unlocked([&] { return p.core->holders(*by_tag); }));
          },
          parameter<kByTag>() = false)
      // (bytes, "any_stream" | "own_stream" | "waiting"), largest first.
      .def(
          "free_pieces",
          [](PyPool& p, Given<kMost> most) {
            must_not_be_forked();
            nb::list out;
            for (const pool::FreePiece& piece : unlocked([&] { return p.core->free_pieces(*most); }))
              out.append(nb::make_tuple(piece.bytes, piece.reuse));
            return out;
          },
          parameter<kMost>())
      .def("debug_totals",
           [](PyPool& p) {
             must_not_be_forked();
             const debug::Totals totals = unlocked([&] { return p.core->debug_totals(); });
             return totals_dict(totals, p.core->page_guard_totals());
           })
      .def("_usage",
           [](PyPool& p) {
             must_not_be_forked();
             nb::list out;
             for (const auto& [site, usage] : unlocked([&] { return p.core->usage(); })) {
               nb::dict d;
               d["allocated_at"] = site;
               d["blocks"] = usage.blocks;
               d["bytes"] = usage.bytes;
               d["untouched"] = usage.untouched;
               out.append(d);
             }
             return out;
           })
      .def(
          "audit",
          [](PyPool& p) {
            must_not_be_forked();
            return unlocked([&] { return p.core->audit(); });
          },
          "Recompute all counters and check all structures: an empty text, or what does not hold. For tests.")
      .def(
          "set_oom_callback", [](PyPool& p, Given<kCallback> callback) { p.oom_callback->set(*callback); },
          parameter<kCallback>())
      .def("close", [](PyPool& p) {
        unlocked([&] { p.core->close(); });
        check_interrupt();
      });
}

}  // namespace streampool::python
