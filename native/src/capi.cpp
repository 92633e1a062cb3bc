// The C ABI of include/streampool/streampool.h over the pool. Imports every room; nobody imports it.
// Nothing here decides anything: it turns handles, options and status values from one side's terms into the other's.
#include <streampool/streampool.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/types.hpp"
#include "capi_faults.hpp"
#include "capi_watch.hpp"
#include "debug/capture.hpp"
#include "debug/fault.hpp"
#include "driver/driver.hpp"
#include "pool/core.hpp"
#include "pool/errors.hpp"
#include "pool/fast.hpp"
#include "pool/options.hpp"

namespace driver = streampool::driver;
namespace pool = streampool::pool;
using streampool::Address;
using streampool::Bytes;

struct sp_device {
  std::shared_ptr<driver::Driver> driver;
  std::string name;
};

struct sp_pool {
  std::shared_ptr<pool::Core> core;
  streampool::capi::FaultTeller faults{};
};

namespace {

// The text of sp_last_error, one for each thread.
std::string& last_error() {
  thread_local std::string text;
  return text;
}

sp_status fail(sp_status status, std::string text) {
  last_error() = std::move(text);
  return status;
}

sp_status null_argument(const char* what) { return fail(SP_ERROR_INVALID_ARGUMENT, std::string(what) + " is NULL"); }

// No exception crosses the ABI.
template <typename Call>
sp_status guarded(Call&& call) noexcept {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    last_error().clear();  // text may need memory that there is none of
    return SP_ERROR_HOST_MEMORY;
  } catch (const std::exception& error) {
    try {
      return fail(SP_ERROR_INTERNAL, error.what());
    } catch (...) {
      return SP_ERROR_INTERNAL;
    }
  } catch (...) {
    return SP_ERROR_INTERNAL;
  }
}

sp_status status_of(pool::Errc code) {
  switch (code) {
    case pool::Errc::ok: return SP_OK;
    case pool::Errc::invalid_value:
    case pool::Errc::invalid_size:
    case pool::Errc::invalid_alignment: return SP_ERROR_INVALID_ARGUMENT;
    case pool::Errc::out_of_memory: return SP_ERROR_OUT_OF_MEMORY;
    case pool::Errc::double_free: return SP_ERROR_DOUBLE_FREE;
    case pool::Errc::foreign_free: return SP_ERROR_FOREIGN_FREE;
    case pool::Errc::interior_free: return SP_ERROR_INTERIOR_FREE;
    case pool::Errc::wrong_pool: return SP_ERROR_WRONG_POOL;
    case pool::Errc::trampled_record: return SP_ERROR_TRAMPLED_RECORD;
    case pool::Errc::size_mismatch: return SP_ERROR_SIZE_MISMATCH;
    case pool::Errc::stream: return SP_ERROR_STREAM;
    case pool::Errc::capture: return SP_ERROR_CAPTURE;
    case pool::Errc::driver: return SP_ERROR_DRIVER;
    case pool::Errc::closed: return SP_ERROR_POOL_CLOSED;
    case pool::Errc::forked:
    case pool::Errc::exiting: return SP_ERROR_GOING_DOWN;
    case pool::Errc::interrupted:  // only where a hook of ours says so, and this side sets none
    case pool::Errc::internal: return SP_ERROR_INTERNAL;
  }
  return SP_ERROR_INTERNAL;
}

sp_status finish(pool::Errc code, pool::Failure& failure) {
  if (code == pool::Errc::ok) return SP_OK;
  return fail(
      failure.lost ? SP_ERROR_DEVICE_LOST : status_of(code),
      (failure.text.empty() ? std::string(pool::errc_word(code)) : std::move(failure.text)) + pool::see_page(code));
}

sp_status finish(const driver::Status& status) {
  switch (status.code) {
    case driver::Code::ok: return SP_OK;
    case driver::Code::capturing: return fail(SP_ERROR_CAPTURE, driver::describe(status));
    case driver::Code::invalid: return fail(SP_ERROR_STREAM, driver::describe(status));
    case driver::Code::lost: return fail(SP_ERROR_DEVICE_LOST, driver::describe(status));
    case driver::Code::gone: return fail(SP_ERROR_GOING_DOWN, driver::describe(status));
    case driver::Code::out_of_memory: return fail(SP_ERROR_OUT_OF_MEMORY, driver::describe(status));
    case driver::Code::not_ready:
    case driver::Code::not_supported:
    case driver::Code::failed: return fail(SP_ERROR_DRIVER, driver::describe(status));
  }
  return SP_ERROR_INTERNAL;
}

sp_status status_of(driver::OpenError error) {
  switch (error) {
    case driver::OpenError::bad_name: return SP_ERROR_INVALID_ARGUMENT;
    case driver::OpenError::no_library:
    case driver::OpenError::no_device: return SP_ERROR_DRIVER_NOT_FOUND;
    case driver::OpenError::none:
    case driver::OpenError::too_old:
    case driver::OpenError::broken: return SP_ERROR_DRIVER;
  }
  return SP_ERROR_DRIVER;
}

driver::StreamHandle handle(sp_stream stream) { return reinterpret_cast<driver::StreamHandle>(stream); }
Address address(const void* ptr) { return reinterpret_cast<std::uintptr_t>(ptr); }

std::optional<streampool::Kind> kind_of(std::string_view word) {
  for (const auto kind : {streampool::Kind::device, streampool::Kind::pinned, streampool::Kind::managed})
    if (word == streampool::kind_name(kind)) return kind;
  return std::nullopt;
}

// "name=value:name=value" as arguments, over the environment, over the mode's preset. A watched process's mode is over
// all of them, and where `pool` asks for another one, a line says so (R17).
bool read_options(std::string_view text, const char* pool, pool::OptionMap* resolved, pool::Options* out,
                  std::string* error) {
  pool::OptionMap arguments;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(':'), text.size());
    const std::string_view item = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (item.empty()) continue;
    const std::size_t equals = item.find('=');
    if (equals == std::string_view::npos) {
      *error = "options: '" + std::string(item) + "' is not name=value";
      return false;
    }
    arguments[std::string(item.substr(0, equals))] = std::string(item.substr(equals + 1));
  }
  const char* const variable = std::getenv("STREAMPOOL_OPTIONS");
  const char* const environment = variable != nullptr ? variable : "";
  if (!pool::resolve_options(arguments, environment, resolved, error)) return false;
  const std::string mode = streampool::capi::watched_mode();
  if (!mode.empty() && (*resolved)["mode"] != mode) {
    if (const auto asked = arguments.find("mode"); asked != arguments.end())
      std::fprintf(stderr, "streampool: pool '%s': mode=%s in the program, overridden by --mode %s\n", pool,
                   asked->second.c_str(), mode.c_str());
    arguments["mode"] = mode;
    if (!pool::resolve_options(arguments, environment, resolved, error)) return false;
  }
  return pool::to_options(*resolved, out, error);
}

// Where Python runs the program, its frames; native ones where the pool was asked to keep some.
streampool::debug::StackId stack_of_call(const pool::Core& core) {
  return streampool::debug::capture(core.options().stack_depth, core.options().native_depth);
}

// Does with the faults that were found and not yet told what option on_fault says.
sp_status tell_faults(sp_pool& pool) {
  std::optional<std::string> raised = pool.faults.tell(&pool, *pool.core);
  return raised ? fail(SP_ERROR_FAULT, std::move(*raised)) : SP_OK;
}

sp_status free_block(sp_pool* handle, void* ptr, std::optional<driver::StreamHandle> stream,
                     std::optional<Bytes> size = {}) {
  if (handle == nullptr) return null_argument("pool");
  if (ptr == nullptr) return SP_OK;
  pool::Failure failure;
  pool::FreeRequest request;
  request.stream = stream;
  request.size = size;
  if (handle->core->debugging()) request.stack = stack_of_call(*handle->core);
  const sp_status status = finish(handle->core->free(address(ptr), request, &failure), failure);
  // Who asked for an error has one already.
  if (status != SP_OK && handle->core->options().on_fault != pool::Options::OnFault::raise) tell_faults(*handle);
  return status;
}

// The full calls, kept apart so that the fast paths in front of them need no stack frame for theirs.
[[gnu::noinline]] sp_status full_alloc(sp_pool* pool, std::size_t size, std::size_t alignment, sp_stream stream,
                                       void** out) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    if (out == nullptr) return null_argument("out");
    pool::Core& core = *pool->core;
    if (const sp_status status = tell_faults(*pool); status != SP_OK) return status;
    pool::AllocRequest request;
    request.size = size;
    request.alignment = alignment != 0 ? alignment : streampool::kMinAlignment;
    request.stream = handle(stream);
    request.stream_ordered = core.options().stream_ordered;
    request.raw = true;
    if (core.debugging()) request.stack = stack_of_call(core);
    pool::BlockRef block;
    pool::Failure failure;
    const sp_status status = finish(core.allocate(request, &block, &failure), failure);
    if (status == SP_OK) *out = reinterpret_cast<void*>(block.address);
    return status;
  });
}

[[gnu::noinline]] sp_status finish_fast(sp_pool* pool) {
  return guarded([&] { return pool->core->finish(), SP_OK; });
}

[[gnu::noinline]] sp_status full_free(sp_pool* pool, void* ptr, sp_stream stream) {
  return guarded([&] { return free_block(pool, ptr, handle(stream)); });
}

}  // namespace

extern "C" {

const char* sp_version(void) { return SP_VERSION_STRING; }

const char* sp_last_error(void) { return last_error().c_str(); }

const char* sp_status_name(sp_status status) {
  switch (status) {
    case SP_OK: return "SP_OK";
    case SP_ERROR_INVALID_ARGUMENT: return "SP_ERROR_INVALID_ARGUMENT";
    case SP_ERROR_OUT_OF_MEMORY: return "SP_ERROR_OUT_OF_MEMORY";
    case SP_ERROR_HOST_MEMORY: return "SP_ERROR_HOST_MEMORY";
    case SP_ERROR_DOUBLE_FREE: return "SP_ERROR_DOUBLE_FREE";
    case SP_ERROR_FOREIGN_FREE: return "SP_ERROR_FOREIGN_FREE";
    case SP_ERROR_INTERIOR_FREE: return "SP_ERROR_INTERIOR_FREE";
    case SP_ERROR_WRONG_POOL: return "SP_ERROR_WRONG_POOL";
    case SP_ERROR_TRAMPLED_RECORD: return "SP_ERROR_TRAMPLED_RECORD";
    case SP_ERROR_SIZE_MISMATCH: return "SP_ERROR_SIZE_MISMATCH";
    case SP_ERROR_STREAM: return "SP_ERROR_STREAM";
    case SP_ERROR_CAPTURE: return "SP_ERROR_CAPTURE";
    case SP_ERROR_DRIVER_NOT_FOUND: return "SP_ERROR_DRIVER_NOT_FOUND";
    case SP_ERROR_DRIVER: return "SP_ERROR_DRIVER";
    case SP_ERROR_DEVICE_LOST: return "SP_ERROR_DEVICE_LOST";
    case SP_ERROR_GOING_DOWN: return "SP_ERROR_GOING_DOWN";
    case SP_ERROR_POOL_CLOSED: return "SP_ERROR_POOL_CLOSED";
    case SP_ERROR_FAULT: return "SP_ERROR_FAULT";
    case SP_ERROR_INTERNAL: return "SP_ERROR_INTERNAL";
  }
  return "unknown sp_status";
}

// -- devices
// ------------------------------------------------------------------------------------------------------------

sp_status sp_device_open(const char* name, sp_device** out) {
  return guarded([&] {
    if (name == nullptr) return null_argument("the device's name");
    if (out == nullptr) return null_argument("out");
    driver::OpenError kind = driver::OpenError::none;
    std::string error;
    auto opened = driver::open(name, &kind, &error);
    if (!opened) return fail(status_of(kind), std::move(error));
    std::string opened_name(opened->name());
    *out = new sp_device{std::move(opened), std::move(opened_name)};
    return SP_OK;
  });
}

sp_status sp_device_close(sp_device* device) {
  return guarded([&] {
    delete device;
    return SP_OK;
  });
}

const char* sp_device_name(const sp_device* device) { return device != nullptr ? device->name.c_str() : nullptr; }

sp_status sp_stream_create(sp_device* device, sp_stream* out) {
  return guarded([&] {
    if (device == nullptr) return null_argument("device");
    if (out == nullptr) return null_argument("out");
    driver::StreamHandle created = 0;
    const sp_status status = finish(device->driver->stream_create(&created));
    if (status == SP_OK) *out = reinterpret_cast<sp_stream>(created);
    return status;
  });
}

sp_status sp_stream_destroy(sp_device* device, sp_stream stream) {
  return guarded([&] {
    if (device == nullptr) return null_argument("device");
    return finish(device->driver->stream_destroy(handle(stream)));
  });
}

// -- pools
// --------------------------------------------------------------------------------------------------------------

sp_status sp_pool_create(sp_device* device, const char* kind, const char* name, const char* options, sp_pool** out) {
  return guarded([&] {
    if (device == nullptr) return null_argument("device");
    if (kind == nullptr) return null_argument("kind");
    if (out == nullptr) return null_argument("out");
    const auto wanted = kind_of(kind);
    if (!wanted) {
      return fail(SP_ERROR_INVALID_ARGUMENT,
                  "no kind of memory '" + std::string(kind) + "': there are device, pinned and managed");
    }
    pool::OptionMap resolved;
    pool::Options settings;
    std::string error;
    const char* const called = name != nullptr ? name : "default";
    if (!read_options(options != nullptr ? options : "", called, &resolved, &settings, &error))
      return fail(SP_ERROR_INVALID_ARGUMENT, std::move(error));
    pool::Failure failure;
    auto core = pool::Core::create(device->driver, *wanted, called, settings, &failure);
    if (!core) return finish(failure.code, failure);
    streampool::capi::note_pool(core, std::move(resolved));
    *out = new sp_pool;
    (*out)->core = std::move(core);
    return SP_OK;
  });
}

sp_status sp_pool_close(sp_pool* pool) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    pool->core->close();
    return tell_faults(*pool);
  });
}

sp_status sp_pool_destroy(sp_pool* pool) {
  return guarded([&] {
    if (pool == nullptr) return SP_OK;
    const std::unique_ptr<sp_pool> owner(pool);
    pool->core->close();
    if (pool->core->stats().live_blocks != 0) {
      // Somebody still uses these blocks: their memory stays until the process ends. Never destroyed, for the same
      // reason.
      static std::mutex mutex;
      static auto* const outlived = new std::vector<std::shared_ptr<pool::Core>>;
      const std::lock_guard lock(mutex);
      outlived->push_back(pool->core);
    }
    streampool::capi::note_end(*pool->core);
    return SP_OK;
  });
}

// -- blocks
// -------------------------------------------------------------------------------------------------------------

sp_status sp_alloc(sp_pool* pool, size_t size, size_t alignment, sp_stream stream, void** out) {
  if (pool == nullptr || out == nullptr || alignment != 0) [[unlikely]]
    return full_alloc(pool, size, alignment, stream, out);
  pool::BlockRef block;
  const auto fast = pool->core->fast_allocate(size, handle(stream), pool::kRawBlock, 0, &block);
  if (fast == pool::Core::Fast::no) [[unlikely]]
    return full_alloc(pool, size, alignment, stream, out);
  *out = reinterpret_cast<void*>(block.address);
  if (fast == pool::Core::Fast::raise) [[unlikely]]
    return finish_fast(pool);
  return SP_OK;
}

sp_status sp_free_sized(sp_pool* pool, void* ptr, size_t size, sp_stream stream) {
  return guarded([&] { return free_block(pool, ptr, handle(stream), size); });
}

sp_status sp_free(sp_pool* pool, void* ptr, sp_stream stream) {
  if (pool == nullptr) [[unlikely]]
    return full_free(pool, ptr, stream);
  const auto fast = pool->core->fast_free(address(ptr), handle(stream));
  if (fast == pool::Core::Fast::no) [[unlikely]]
    return full_free(pool, ptr, stream);
  if (fast == pool::Core::Fast::raise) [[unlikely]]
    return finish_fast(pool);
  return SP_OK;
}

sp_status sp_release(sp_pool* pool, void* ptr) {
  return guarded([&] { return free_block(pool, ptr, std::nullopt); });
}

sp_status sp_record_stream(sp_pool* pool, const void* ptr, sp_stream stream) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    pool::Failure failure;
    return finish(pool->core->record_stream(address(ptr), handle(stream), &failure), failure);
  });
}

sp_status sp_record_event(sp_pool* pool, const void* ptr, sp_event event) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    pool::Failure failure;
    return finish(pool->core->record_event(address(ptr), reinterpret_cast<driver::EventHandle>(event), &failure),
                  failure);
  });
}

// -- streams
// ------------------------------------------------------------------------------------------------------------

sp_status sp_register_stream(sp_pool* pool, sp_stream stream) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    pool::Failure failure;
    return finish(pool->core->register_stream(handle(stream), &failure), failure);
  });
}

sp_status sp_forget_stream(sp_pool* pool, sp_stream stream) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    pool::Failure failure;
    return finish(pool->core->forget_stream(handle(stream), &failure), failure);
  });
}

// -- the pool's memory
// --------------------------------------------------------------------------------------------------

sp_status sp_reserve(sp_pool* pool, size_t size) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    Bytes reserved = 0;
    pool::Failure failure;
    return finish(pool->core->reserve(size, &reserved, &failure), failure);
  });
}

sp_status sp_trim(sp_pool* pool, size_t keep_bytes, size_t* released) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    const pool::TrimResult result = pool->core->trim(keep_bytes);
    if (released != nullptr) *released = result.released;
    return SP_OK;
  });
}

sp_status sp_check(sp_pool* pool, double timeout, uint64_t* faults) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    if (!(timeout >= 0)) return fail(SP_ERROR_INVALID_ARGUMENT, "the timeout is not a number of seconds from 0 up");
    const pool::CheckReport report = pool->core->check(timeout);
    if (faults != nullptr) *faults = report.result.faults;
    pool::Failure failure;
    if (report.errc != pool::Errc::ok) return finish(report.errc, failure);
    return tell_faults(*pool);
  });
}

sp_status sp_set_fault_function(sp_pool* pool, sp_fault_function function, void* user) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    if (function != nullptr && pool->core->options().on_fault != pool::Options::OnFault::callback)
      return fail(SP_ERROR_INVALID_ARGUMENT, "the pool calls no function: make it with option on_fault=callback");
    pool->faults.call(function, user);
    return SP_OK;
  });
}

sp_status sp_stats(sp_pool* pool, sp_stats_t* stats) {
  return guarded([&] {
    if (pool == nullptr) return null_argument("pool");
    if (stats == nullptr) return null_argument("stats");
    if (stats->struct_size < sizeof(size_t)) return fail(SP_ERROR_INVALID_ARGUMENT, "stats->struct_size is not set");
    const pool::Stats now = pool->core->stats();
    sp_stats_t filled{};
    filled.struct_size = std::min(stats->struct_size, sizeof filled);
    filled.in_use = now.in_use;
    filled.rounding = now.rounding;
    filled.guards = now.guards;
    filled.quarantined = now.quarantined;
    filled.pending = now.pending;
    filled.cached = now.cached;
    filled.reserved = now.reserved;
    filled.in_use_peak = now.in_use_peak;
    filled.reserved_peak = now.reserved_peak;
    filled.limit = now.limit != 0 ? now.limit : UINT64_MAX;
    filled.live_blocks = now.live_blocks;
    filled.allocations = now.allocations;
    filled.frees = now.frees;
    filled.failures = now.out_of_memory;
    filled.faults = pool->core->debug_totals().faults;
    std::memcpy(stats, &filled, filled.struct_size);
    return SP_OK;
  });
}

}  // extern "C"
