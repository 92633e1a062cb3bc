#include "facts.hpp"

#include <nanobind/stl/string.h>

#include <string>

namespace streampool::python {

// "stream" is the driver's id, and 0 for a block of a graph; then "capture" is the capture's.
void put_stream(nb::dict d, std::uint64_t id) {
  const bool captured = (id & kCapturedId) != 0;
  d["stream"] = captured ? 0 : id;
  d["capture"] = captured ? id & ~kCapturedId : 0;
}

nb::dict facts_dict(const debug::BlockFacts& f) {
  nb::dict d;
  d["serial"] = f.serial;
  d["state"] = std::string(debug::block_state_word(f.state));
  d["address"] = f.address;
  d["size"] = f.size;
  d["begin"] = f.begin;
  d["reserved"] = f.reserved;
  put_stream(d, f.stream);
  d["allocated_thread"] = f.allocated_thread;
  d["freed_thread"] = f.freed_thread;
  d["allocated_time"] = f.allocated_time;
  d["freed_time"] = f.freed_time;
  d["allocated_at"] = f.allocated_at;
  d["freed_at"] = f.freed_at;
  d["raw"] = f.raw;
  d["exported"] = f.exported;
  d["tag"] = f.tag;
  d["pages"] = std::string(debug::page_guard_word(f.pages));
  return d;
}

nb::dict live_block_dict(const debug::BlockFacts& f) {
  nb::dict d = facts_dict(f);
  d["owner"] = f.raw ? "raw" : f.state == debug::BlockState::released ? "released" : "buffer";
  return d;
}

nb::dict fault_dict(const debug::Fault& f) {
  const auto optional = [](const std::optional<debug::BlockFacts>& facts) {
    return facts ? nb::object(facts_dict(*facts)) : nb::none();
  };
  const auto bytes = [](const std::vector<std::uint8_t>& v) { return nb::bytes(v.data(), v.size()); };
  nb::dict d;
  d["kind"] = std::string(debug::fault_word(f.kind));
  d["number"] = f.number;
  d["count"] = f.count;
  d["block"] = optional(f.block);
  d["below"] = optional(f.below);
  d["above"] = optional(f.above);
  d["address"] = f.address;
  d["last"] = f.last;
  d["bad_bytes"] = f.bad_bytes;
  d["shown_from"] = f.shown_from;
  d["found"] = bytes(f.found);
  d["expected"] = bytes(f.expected);
  d["at"] = f.at;
  d["time"] = f.time;
  d["last_good_check"] = f.last_good_check;
  d["found_by_check"] = f.found_by_check;
  d["last_good_time"] = f.last_good_time;
  nb::list scopes;
  for (const std::string& name : f.scopes) scopes.append(name);
  d["scopes"] = scopes;
  nb::list candidates;
  for (const debug::Candidate& candidate : f.candidates) {
    nb::dict c = facts_dict(candidate.block);
    c["why"] = candidate.why;
    candidates.append(c);
  }
  d["candidates"] = candidates;
  d["note"] = f.note;
  return d;
}

nb::dict totals_dict(const debug::Totals& t, const debug::PageGuardTotals& p) {
  nb::dict d;
  d["checks"] = t.checks;
  d["blocks_checked"] = t.blocks_checked;
  d["blocks_freed"] = t.blocks_freed;
  d["blocks_not_checked"] = t.blocks_not_checked;
  d["quarantined_blocks"] = t.quarantined_blocks;
  d["quarantined_bytes"] = t.quarantined_bytes;
  d["faults"] = t.faults;
  d["faults_dropped"] = t.faults_dropped;
  d["faults_repeated"] = t.faults_repeated;
  d["freed_bytes"] = t.freed_bytes;
  d["untouched_bytes"] = t.untouched_bytes;
  d["page_guarded"] = p.guarded;
  d["page_guarded_live"] = p.live;
  d["page_guard_bytes"] = p.bytes;
  d["page_guards_over_cap"] = p.over_cap;
  d["page_guards_refused"] = p.refused;
  d["page_guards_covered"] = p.covered;
  return d;
}

nb::list holders_list(const std::vector<pool::Holder>& holders) {
  nb::list out;
  for (const pool::Holder& h : holders)
    out.append(nb::make_tuple(h.bytes, h.blocks, h.stack, h.allocated_bytes, h.allocated_blocks, h.oldest, h.aged_bytes,
                              h.tag));
  return out;
}

nb::dict stats_dict(const pool::Stats& s) {
  nb::dict d;
#define PUT(field) d[#field] = s.field
  PUT(in_use);
  PUT(rounding);
  PUT(guards);
  PUT(quarantined);
  PUT(pending);
  PUT(cached);
  PUT(reserved);
  PUT(in_use_peak);
  PUT(reserved_peak);
  PUT(limit);
  PUT(largest_free);
  PUT(allocations);
  PUT(frees);
  PUT(live_blocks);
  PUT(allocated_bytes);
  PUT(segments);
  PUT(handles);
  PUT(streams);
  PUT(slabs);
  PUT(extents);
  PUT(fences);
  PUT(fences_failed);
  PUT(polls);
  PUT(wait_edges);
  PUT(context_events);
  PUT(stream_lookups);
  PUT(host_waits);
  PUT(out_of_memory);
  PUT(trampled);
  PUT(legacy_fences);
  PUT(handles_moved);
#undef PUT
  d["source"] = std::string(pool::source_word(s.source));
  nb::dict paths;
  for (std::size_t i = 0; i < pool::kPathCount; ++i) paths[pool::path_words()[i]] = s.paths[i];
  d["paths"] = paths;
  return d;
}

}  // namespace streampool::python
