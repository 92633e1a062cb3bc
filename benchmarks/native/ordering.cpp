// What ordering costs: each call of the driver that the pool may make for it, alone, and what a pair makes of them. The
// calls are counted, so that the table shows not only what they cost but how many there are.
#include <array>
#include <functional>

#include "driver/driver.hpp"
#include "pool/core.hpp"
#include "streampool_peer.hpp"

namespace bench {
namespace {

using streampool::driver::Driver;
using streampool::driver::EventHandle;
using streampool::driver::kCallCount;
using streampool::driver::kCallNames;
using streampool::driver::Status;
using streampool::driver::StreamHandle;

void must(Status status) {
  if (!status.ok()) throw std::runtime_error(streampool::driver::describe(status));
}

std::shared_ptr<streampool::pool::Core> core_of(const sp::Pool& pool, const char* name) {
  for (const auto& core : streampool::pool::Core::all())
    if (core->name() == name) return core;
  static_cast<void>(pool);
  throw std::runtime_error("the pool is gone");
}

class Table {
 public:
  Table(streampool::pool::Core& core, std::int64_t operations)
      : core_(core), driver_(core.driver()), operations_(operations) {}

  // Takes the time of `once`, with what it made the driver do.
  void add(const std::string& what, const std::function<void()>& once) {
    once();
    const auto before = driver_.calls();
    const std::uint64_t named = core_.stats().stream_lookups;
    const Times times = timed(operations_, once);
    const auto after = driver_.calls();
    text_ += (text_.empty() ? "" : ", ") + ("{\"what\": " + quoted(what)) + ", \"ns\": " + number(times.mean()) + ", " +
             spread(times) + ", \"calls\": {";
    const char* comma = "";
    for (std::size_t i = 0; i < kCallCount; ++i) {
      if (after[i] == before[i]) continue;
      text_ += comma + quoted(kCallNames[i]) + ": " +
               number(static_cast<double>(after[i] - before[i]) / static_cast<double>(operations_));
      comma = ", ";
    }
    // Pools count these themselves: "does it capture?", its id, and on CUDA whether its context lives.
    if (const std::uint64_t lookups = core_.stats().stream_lookups - named; lookups != 0)
      text_ += comma + quoted("stream_lookups") + ": " +
               number(static_cast<double>(lookups) / static_cast<double>(operations_));
    text_ += "}}";
  }
  std::string text() const { return "{\"rows\": [" + text_ + "]}"; }

 private:
  streampool::pool::Core& core_;
  Driver& driver_;
  std::int64_t operations_;
  std::string text_;
};

}  // namespace

std::string StreampoolPeer::ordering(std::int64_t operations) {
  const sp::Pool pool(device_, "device", "mode=production", "ordering");
  const std::shared_ptr<streampool::pool::Core> core = core_of(pool, "ordering");
  Driver& driver = core->driver();
  const sp::Stream first = device_.create_stream(), second = device_.create_stream(), raw = device_.create_stream();
  const auto handle = [](const sp::Stream& s) { return reinterpret_cast<StreamHandle>(s.get()); };
  const StreamHandle s = handle(first), t = handle(second);
  Table table(*core, operations);

  streampool::driver::CaptureState capture;
  std::uint64_t id = 0;
  EventHandle event = 0, of_context = 0;
  must(driver.event_create(&event));
  must(driver.event_create(&of_context));
  must(driver.event_record(event, s));
  settle();
  table.add("is the stream capturing", [&] { must(driver.stream_is_capturing(s, &capture)); });
  table.add("id of a stream", [&] { must(driver.stream_id(s, &id)); });
  table.add("event record", [&] { must(driver.event_record(event, s)); });
  settle();
  table.add("poll of an event that is done", [&] { static_cast<void>(driver.event_query(event)); });
  table.add("wait edge", [&] { must(driver.stream_wait_event(t, event)); });
  settle();
  if (driver.capabilities().context_events)
    table.add("context event", [&] { must(driver.context_event_record(of_context)); });
  settle();
  table.add("event made and destroyed", [&] {
    EventHandle made = 0;
    must(driver.event_create(&made));
    must(driver.event_destroy(made));
  });
  must(driver.event_destroy(event));
  must(driver.event_destroy(of_context));

  pool.register_stream(first);
  pool.register_stream(second);
  const auto pair_on = [&](const sp::Stream& stream, std::size_t size) {
    return [&pool, &stream, size] {
      void* block = nullptr;
      sp::check(sp_alloc(pool.get(), size, 0, stream.get(), &block));
      sp::check(sp_free(pool.get(), block, stream.get()));
    };
  };
  table.add("4 KiB pair, lasting stream", pair_on(first, 4096));
  table.add("1 MiB pair, lasting stream", pair_on(first, 1 << 20));
  table.add("4 KiB pair, raw handle", pair_on(raw, 4096));
  table.add("1 MiB pair, raw handle: fenced in the free", pair_on(raw, 1 << 20));
  settle();
  // A block that another stream freed, and whose work is done: by turns on two lasting streams, none of which has
  // memory of its own.
  bool turn = false;
  table.add("4 MiB pair, by turns on two lasting streams", [&] {
    turn = !turn;
    pair_on(turn ? first : second, 4 << 20)();
  });
  settle();
  pool.forget_stream(first);
  pool.forget_stream(second);
  return table.text();
}

}  // namespace bench
