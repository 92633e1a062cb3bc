// The numbers of all pools for metrics (pool/pulse.hpp): as rows of numbers, read without the GIL.
#include <nanobind/stl/string.h>

#include "arguments.hpp"
#include "facts.hpp"
#include "pool/pulse.hpp"
#include "pool_objects.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

constexpr Flag kEachPool{"each_pool"};

// (event, memory kind, device, pool, reason, {field: number}, Unix time) of each.
nb::list as_tuples(const std::vector<observe::Event>& events) {
  struct Words {
    const char *event, *number, *more;
  };
  static constexpr Words kWords[] = {
#define STREAMPOOL_ROW(name, word, number, more) {word, number, more},
      STREAMPOOL_EVENTS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
  };
  nb::list out;
  for (const observe::Event& event : events) {
    const Words& words = kWords[static_cast<std::size_t>(event.kind)];
    nb::dict numbers;
    if (*words.number != 0) numbers[words.number] = event.number;
    if (*words.more != 0) numbers[words.more] = event.more;
    // A pool's name may have been cut in the middle of a character.
    const nb::object pool = nb::steal(
        PyUnicode_DecodeUTF8(event.pool.data(), static_cast<Py_ssize_t>(std::strlen(event.pool.data())), "replace"));
    out.append(nb::make_tuple(words.event, std::string(kind_name(event.memory)), event.device.data(), pool,
                              event.reason.data(), numbers, event.at));
  }
  return out;
}

}  // namespace

void bind_pulse(nb::module_& m) {
  // Host memory of a block's record, in every mode, and of a tracked block's facts.
  m.attr("BLOCK_RECORD_BYTES") = sizeof(pool::BlockRecord);
  m.attr("BLOCK_FACTS_BYTES") = sizeof(pool::BlockExtra);
  // (name, "gauge" | "highest" | "tally") of each number of a row.
  m.def("pulse_columns", [] {
    nb::list out;
    for (const pool::ColumnInfo& column : pool::columns()) {
      using Sort = pool::ColumnInfo::Sort;
      const char* sort = column.sort == Sort::gauge ? "gauge" : column.sort == Sort::highest ? "highest" : "tally";
      out.append(nb::make_tuple(column.name, sort));
    }
    return out;
  });
  // Upper bounds: of request sizes in bytes, of driver calls in seconds; what a count of sizes is in; words of the
  // work.
  m.def("pulse_bounds", [] {
    nb::list sizes, seconds, work;
    for (std::size_t i = 0; i < observe::kSizeBounds; ++i) sizes.append(observe::size_bound(i));
    for (const std::uint64_t bound : driver::kCallTimeBounds) seconds.append(static_cast<double>(bound) * 1e-9);
    for (const char* word : driver::memory_work_words()) work.append(word);
    return nb::make_tuple(sizes, seconds, observe::kCountUnit, work);
  });
  m.def(
      "read_pulse",
      [](Given<kEachPool> each_pool) {
        const pool::Rows of = *each_pool ? pool::Rows::pools : pool::Rows::names;
        const pool::Pulse pulse = unlocked([of] { return pool::read_pulse(of); });
        nb::list rows, devices;
        for (const pool::PulseRow& row : pulse.rows) {
          nb::list values;
          for (const std::uint64_t value : row.values) values.append(value);
          nb::object limit = nb::none();
          if (row.live && !row.unlimited) limit = nb::int_(row.limit);
          rows.append(nb::make_tuple(row.device, row.pool, row.kind, row.live, limit, row.sized, values));
        }
        for (const pool::DevicePulse& d : pulse.devices) {
          nb::list times;
          for (const auto& bins : d.call_times) {
            nb::list counts;
            for (const std::uint64_t count : bins.counts) counts.append(count);
            times.append(nb::make_tuple(counts, static_cast<double>(bins.sum) * 1e-9));
          }
          nb::object sample = nb::none();
          if (d.sampled_at >= 0) sample = nb::make_tuple(d.free, d.total, d.sampled_at);
          devices.append(nb::make_tuple(d.name, d.version, d.simulated, d.total_memory, d.now, sample, times));
        }
        return nb::make_tuple(rows, devices, pulse.other_names, pulse.dropped_events);
      },
      parameter<kEachPool>() = false);
  // What call sites hold, pool by pool: for people, not for scrapes; looks at every live block.
  m.def(
      "read_holders",
      [](Given<kByTag> by_tag) {
        struct Held {
          std::string device, name, kind;
          Bytes sample_bytes = 0;
          std::vector<pool::Holder> holders;
        };
        const std::vector<Held> all = unlocked([&by_tag] {
          std::vector<Held> held;
          if (driver::ending() != driver::Ending::no) return held;
          for (const auto& core : pool::Core::all())
            held.push_back({std::string(core->driver().name()), core->name(), std::string(kind_name(core->kind())),
                            core->sampler().mean(), core->holders(*by_tag)});
          return held;
        });
        nb::list out;
        for (const Held& held : all)
          out.append(nb::make_tuple(held.device, held.name, held.kind, held.sample_bytes, holders_list(held.holders)));
        return out;
      },
      parameter<kByTag>() = false);
  // What happened since the last call.
  m.def("drain_events", [] {
    if (driver::ending() == driver::Ending::forked) return nb::list();
    return as_tuples(unlocked([] { return pool::events().drain(); }));
  });
  // The last events, also those that were drained; takes nothing away.
  m.def("last_events", [] { return as_tuples(unlocked([] { return pool::last_events().read(); })); });
  m.def("event_words", [] {
    nb::list out;
#define STREAMPOOL_ROW(name, word, number, more) out.append(nb::make_tuple(word, number, more));
    STREAMPOOL_EVENTS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
    return out;
  });
  m.def("sample_devices", [] { return unlocked([] { return pool::sample_devices(); }); });
}

}  // namespace streampool::python
