#include "options.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>

namespace streampool::pool {
namespace {

constexpr auto kTable = std::to_array<OptionRow>({
    {"mode", OptionType::choice, "production", "off|observe|production|debug|paranoid",
     "preset that the other options start from"},
    {"limit", OptionType::amount, "0", "",
     "most bytes the pool may hold from the driver, or a part of the device's memory as 80% or 0.8; 0: no limit"},
    {"initial", OptionType::size, "0", "", "bytes taken from the driver when the pool is made"},
    {"stream_ordered", OptionType::boolean, "false", "",
     "pinned and managed memory is touched by the host in stream order only, so it may be reused at once on its "
     "stream"},
    {"segments", OptionType::choice, "auto", "auto|vmm|malloc|driver",
     "where device memory comes from: virtual memory management (auto and vmm: where there is any, else malloc), "
     "driver "
     "allocations in one piece, or the driver's own stream-ordered pool"},
    {"export", OptionType::choice, "none", "none|posix_fd|fabric",
     "how handles of virtual memory can be given to other processes"},
    {"rdma", OptionType::boolean, "false", "", "network cards may reach virtual memory (GPUDirect RDMA)"},
    {"peers", OptionType::text, "", "",
     "other devices that may reach virtual memory, by their numbers as 1,2; all: every one that can"},
    {"reuse", OptionType::choice, "wait", "wait|opportunistic|deterministic",
     "reuse across streams: completed work and wait edges, completed work only, or none"},
    {"legacy_fences", OptionType::boolean, "true", "",
     "late in the ladder the legacy default stream may be fenced, which orders all blocking streams"},
    {"recover_stranded", OptionType::boolean, "true", "",
     "marks that no stream will ever fence are completed by a context event"},
    {"wait_timeout", OptionType::seconds, "10", "", "longest wait for pending frees before an out-of-memory error"},
    {"fence_age", OptionType::seconds, "0.0001", "",
     "an unfenced free older than this is fenced by the next call that names its stream"},
    {"release_threshold", OptionType::amount, "0", "",
     "idle bytes above this (or this part of the device's memory, as 10%) go back to the driver on the slow path, at "
     "check() and in waits; 0: keep all"},
    {"stack_depth", OptionType::integer, "0", "", "Python frames kept for each allocation; 0: none"},
    {"native_depth", OptionType::integer, "0", "",
     "native frames kept beside them, also of threads without Python; 0: none. Costs about 0.2 µs a frame"},
    {"sample_bytes", OptionType::size, "4194304", "",
     "one allocation in so many bytes, on average, keeps its call stack, where stack_depth keeps none; 0: none",
     1024 * kGiB},
    {"track", OptionType::boolean, "false", "", "keep serial number, thread and time of each block"},
    {"guard_bytes", OptionType::size, "0", "", "known bytes before and after each block; 0: no guards", kMiB},
    {"fill", OptionType::boolean, "false", "", "free memory holds a pattern, which is verified"},
    {"fill_edge_bytes", OptionType::size, "0", "",
     "fill and verify only this many bytes at each end of a freed block; 0: all"},
    {"quarantine_bytes", OptionType::size, "0", "", "freed blocks kept back and checked when they leave; 0: none"},
    {"quarantine_blocks", OptionType::integer, "0", "", "most blocks kept in quarantine; 0: any number"},
    {"quarantine_age", OptionType::seconds, "0", "", "longest time that a block stays in quarantine; 0: any time"},
    {"count_untouched", OptionType::boolean, "false", "",
     "count, for each call site, the bytes of freed blocks that were never written (with fill of whole blocks)"},
    {"check_every", OptionType::integer, "64", "",
     "frees between two batches of checks: fewer narrow the window in which a fault happened"},
    {"check_bytes", OptionType::size, "33554432", "", "freed bytes between two batches of checks, if they come first"},
    {"check_interval", OptionType::seconds, "0.1", "",
     "longest time from a free to the batch that checks it, while the pool is called"},
    {"page_guards", OptionType::choice, "off", "off|sampled|all",
     "device memory: blocks get pages of their own between unmapped ones, so that an access beyond them or after their "
     "free stops the device and ends its context; each takes whole pages (2 MiB)"},
    {"page_guard_sample", OptionType::size, "67108864", "",
     "page_guards=sampled: one block in so many bytes, on average, so large blocks more often"},
    {"page_guard_min", OptionType::size, "0", "", "only blocks of at least so many bytes get pages of their own"},
    {"page_guard_max", OptionType::size, "0", "", "only blocks of at most so many bytes do; 0: of any size"},
    {"page_guard_sites", OptionType::text, "", "",
     "only blocks do whose tag, or a frame of whose stack (function, file, file:line), fits this glob; empty: all"},
    {"page_guard_side", OptionType::choice, "random", "random|right|left",
     "where a block lies in its pages: at their end, so that a byte behind it faults, or at their start"},
    {"page_guard_cap", OptionType::size, "4294967296", "",
     "most bytes behind blocks with pages of their own, and never more than half of the limit or of the device's "
     "memory; "
     "further blocks get guard bytes, and are counted"},
    {"page_guard_kept", OptionType::integer, "4096", "",
     "freed blocks whose addresses stay unmapped, so that an access after the free faults"},
    {"page_guard_seed", OptionType::integer, "0", "", "what sides and samples are drawn with; 0: chosen, and reported"},
    {"page_guard_records", OptionType::text, "", "",
     "a file for the records of such blocks, which outlives the process; empty: none"},
    {"nvtx_regions", OptionType::choice, "off", "off|auto|on",
     "not shown to work on a GPU yet: tell an attached tool (compute-sanitizer) where each block lies; segments are "
     "driver allocations, and the tool checks instead of the pool. auto: in debug modes, under a sanitizer; without a "
     "tool nothing changes"},
    {"max_faults", OptionType::integer, "100", "", "faults kept in full; more are counted"},
    {"max_repeats", OptionType::integer, "10", "",
     "faults of one kind from the same lines kept in full; more are counted with the last of them; 0: any number"},
    {"on_fault", OptionType::choice, "report", "report|raise|abort|callback",
     "what the call does that is told of a fault: the pool's next allocation or free, check() and close(); for abort "
     "and "
     "callback also the wrong free itself"},
    {"leaks", OptionType::choice, "definite", "definite|all|off", "which leak classes count at the end of a run"},
    {"oom_retries", OptionType::integer, "3", "", "how often the out-of-memory callback may ask for another try"},
});

const OptionRow* find_row(std::string_view name) {
  for (const OptionRow& row : kTable)
    if (name == row.name) return &row;
  return nullptr;
}

// Levenshtein distance, for "did you mean".
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

template <typename Words>
std::string did_you_mean(std::string_view word, const Words& words) {
  std::string best;
  std::size_t best_distance = 4;
  for (std::string_view candidate : words) {
    const std::size_t d = distance(word, candidate);
    if (d < best_distance) {
      best_distance = d;
      best = candidate;
    }
  }
  return best.empty() ? "" : "; did you mean '" + best + "'?";
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

bool parse_bool(std::string_view text, bool* out) {
  if (text == "true" || text == "1" || text == "on" || text == "yes" || text == "True") return *out = true, true;
  if (text == "false" || text == "0" || text == "off" || text == "no" || text == "False") return *out = false, true;
  return false;
}

bool parse_number(std::string_view text, double* out) {
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return problem == std::errc{} && end == text.data() + text.size() && std::isfinite(*out);
}

// "0,2": the devices, each once.
bool parse_peers(std::string_view text, std::vector<int>* out, std::string* error) {
  if (text.empty()) return true;
  for (const std::string_view part : split(text, ',')) {
    int ordinal = 0;
    const auto [end, problem] = std::from_chars(part.data(), part.data() + part.size(), ordinal);
    if (problem != std::errc{} || end != part.data() + part.size() || ordinal < 0)
      return *error = " takes device numbers with commas between them, as 1,2, or all; not '" + std::string(text) + "'",
             false;
    if (std::find(out->begin(), out->end(), ordinal) == out->end()) out->push_back(ordinal);
  }
  return true;
}

// One value in its canonical text, or a sentence.
bool canonical(const OptionRow& row, std::string_view value, std::string* out, std::string* error) {
  const std::string about = std::string("option '") + row.name + "'";
  switch (row.type) {
    case OptionType::boolean: {
      bool b = false;
      if (!parse_bool(value, &b))
        return *error = about + " takes true or false, not '" + std::string(value) + "'", false;
      *out = b ? "true" : "false";
      return true;
    }
    case OptionType::integer: {
      long long n = 0;
      const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), n);
      if (problem != std::errc{} || end != value.data() + value.size() || n < 0 || n > 1000000000)
        return *error = about + " takes a whole number from 0 to 1000000000, not '" + std::string(value) + "'", false;
      *out = std::to_string(n);
      return true;
    }
    case OptionType::size: {
      Bytes n = 0;
      std::string why;
      if (!parse_size(value, &n, &why)) return *error = about + ": " + why, false;
      if (row.most != 0 && n > row.most)
        return *error =
                   about + " takes at most " + std::to_string(row.most) + " bytes, not '" + std::string(value) + "'",
               false;
      *out = std::to_string(n);
      return true;
    }
    case OptionType::amount: {
      Amount amount;
      std::string why;
      if (!parse_amount(value, &amount, &why)) return *error = about + ": " + why, false;
      *out = std::to_string(amount.bytes);
      if (amount.part > 0) {
        char percent[32];
        std::snprintf(percent, sizeof percent, "%.10g%%", amount.part * 100);
        *out = percent;
      }
      return true;
    }
    case OptionType::seconds: {
      double s = 0;
      if (!parse_number(value, &s) || s < 0 || s > 1e9)
        return *error = about + " takes seconds, 0 or more, not '" + std::string(value) + "'", false;
      *out = std::string(value);
      return true;
    }
    case OptionType::choice: {
      const auto choices = split(row.choices, '|');
      if (std::find(choices.begin(), choices.end(), value) == choices.end()) {
        *error = about + " takes one of " + row.choices + ", not '" + std::string(value) + "'" +
                 did_you_mean(value, choices);
        return false;
      }
      *out = std::string(value);
      return true;
    }
    case OptionType::text: {
      std::vector<int> peers;
      std::string why;
      if (std::string_view(row.name) == "peers" && value != "all" && !parse_peers(value, &peers, &why))
        return *error = about + why, false;
      *out = std::string(value);
      return true;
    }
  }
  return false;
}

}  // namespace

std::span<const OptionRow> option_table() { return kTable; }

std::string_view option_type_word(OptionType type) {
  switch (type) {
    case OptionType::boolean: return "bool";
    case OptionType::integer: return "int";
    case OptionType::size: return "size";
    case OptionType::amount: return "size or %";
    case OptionType::seconds: return "seconds";
    case OptionType::choice: return "enum";
    case OptionType::text: return "text";
  }
  return "?";
}

const std::map<std::string, OptionMap, std::less<>>& presets() {
  static const std::map<std::string, OptionMap, std::less<>> table = {
      {"off", {{"sample_bytes", "0"}}},
      {"observe", {}},
      {"production", {}},
      {"debug",
       {{"track", "true"},
        {"stack_depth", "10"},
        {"guard_bytes", "256"},
        {"fill", "true"},
        {"quarantine_bytes", std::to_string(64 * kMiB)}}},
      {"paranoid",
       {{"track", "true"},
        {"stack_depth", "64"},
        {"guard_bytes", "4096"},
        {"fill", "true"},
        {"quarantine_bytes", std::to_string(kGiB)},
        {"check_every", "1"},
        {"count_untouched", "true"},
        {"page_guards", "all"}}},
  };
  return table;
}

bool parse_size(std::string_view text, Bytes* out, std::string* error) {
  const auto bad = [&](const char* why) {
    *error = "'" + std::string(text) + "' is not a size: " + why + "; write bytes or a unit, like 4096, 512MB, 2GiB";
    return false;
  };
  std::string_view rest = text;
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  while (!rest.empty() && rest.back() == ' ') rest.remove_suffix(1);
  if (rest.empty()) return bad("it is empty");
  if (rest.front() == '-') return bad("it is negative");
  std::size_t digits = 0;
  while (digits < rest.size() && (std::isdigit(static_cast<unsigned char>(rest[digits])) || rest[digits] == '.'))
    ++digits;
  const std::string_view number = rest.substr(0, digits);
  std::string_view unit = rest.substr(digits);
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  std::string u;
  for (char c : unit) u += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  static constexpr struct {
    const char* name;
    Bytes factor;
  } kUnits[] = {{"", 1},       {"b", 1},           {"k", kKiB},           {"kb", 1000},        {"kib", kKiB},
                {"m", kMiB},   {"mb", 1000000},    {"mib", kMiB},         {"g", kGiB},         {"gb", 1000000000},
                {"gib", kGiB}, {"t", 1024 * kGiB}, {"tb", 1000000000000}, {"tib", 1024 * kGiB}};
  Bytes factor = 0;
  for (const auto& row : kUnits)
    if (u == row.name) factor = row.factor;
  if (number.empty() || factor == 0) return bad(number.empty() ? "there is no number" : "the unit is unknown");
  Bytes whole = 0;
  const auto [end, problem] = std::from_chars(number.data(), number.data() + number.size(), whole);
  if (problem == std::errc::result_out_of_range) return bad("it does not fit 64 bits");
  if (problem == std::errc{} && end == number.data() + number.size()) {
    if (whole != 0 && factor > ~Bytes{0} / whole) return bad("it does not fit 64 bits");
    *out = whole * factor;
    return true;
  }
  double fraction = 0;
  if (factor == 1 || !parse_number(number, &fraction)) return bad("the number is not one");
  const double bytes = std::floor(fraction * static_cast<double>(factor));
  if (bytes >= 18446744073709551615.0) return bad("it does not fit 64 bits");
  *out = static_cast<Bytes>(bytes);
  return true;
}

Bytes Amount::of(Bytes total) const {
  // A part is never nothing: that would mean no limit.
  return part > 0 ? std::max<Bytes>(1, static_cast<Bytes>(part * static_cast<double>(total))) : bytes;
}

bool parse_amount(std::string_view text, Amount* out, std::string* error) {
  std::string_view rest = text;
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  while (!rest.empty() && rest.back() == ' ') rest.remove_suffix(1);
  const bool percent = !rest.empty() && rest.back() == '%';
  // "0.8" has no unit, so it is no size.
  const bool part = !percent && rest.find('.') != std::string_view::npos &&
                    rest.find_first_not_of("0123456789.") == std::string_view::npos;
  if (!percent && !part) {
    *out = Amount{};
    return parse_size(text, &out->bytes, error);
  }
  if (percent) rest.remove_suffix(1);
  while (!rest.empty() && rest.back() == ' ') rest.remove_suffix(1);
  double number = 0;
  const double most = percent ? 100 : 1;
  if (parse_number(rest, &number) && number > 0 && number <= most) {
    *out = Amount{0, number / most};
    return true;
  }
  *error = "'" + std::string(text) + "' is not a part of the device's memory: write more than 0 and up to 100%, like " +
           "80% or 0.8; or a size, like 4096, 512MB, 2GiB";
  return false;
}

std::string_view source_word(SegmentSource source) {
  switch (source) {
    case SegmentSource::vmm: return "vmm";
    case SegmentSource::malloc: return "malloc";
    case SegmentSource::driver: return "driver";
  }
  return "?";
}

bool resolve_options(const OptionMap& arguments, std::string_view environment, OptionMap* out, std::string* error) {
  OptionMap from_environment;
  if (!environment.empty())
    for (std::string_view item : split(environment, ':')) {
      if (item.empty()) continue;
      const std::size_t at = item.find('=');
      if (at == std::string_view::npos)
        return *error = "STREAMPOOL_OPTIONS: '" + std::string(item) + "' is not name=value", false;
      if (item.substr(0, at) == "help") continue;  // handled by whoever prints it
      from_environment[std::string(item.substr(0, at))] = std::string(item.substr(at + 1));
    }
  const auto checked = [&](const OptionMap& given, const char* whose, OptionMap* canon) {
    for (const auto& [name, value] : given) {
      const OptionRow* row = find_row(name);
      if (row == nullptr) {
        std::vector<std::string_view> names;
        for (const OptionRow& r : kTable) names.push_back(r.name);
        *error = std::string(whose) + "unknown option '" + name + "'" + did_you_mean(name, names);
        return false;
      }
      std::string why;
      if (!canonical(*row, value, &(*canon)[name], &why)) {
        *error = whose + why;
        return false;
      }
    }
    return true;
  };
  OptionMap given, env;
  if (!checked(from_environment, "STREAMPOOL_OPTIONS: ", &env) || !checked(arguments, "", &given)) return false;

  OptionMap result;
  for (const OptionRow& row : kTable) {
    std::string why;
    canonical(row, row.fallback, &result[row.name], &why);
  }
  std::string mode = result["mode"];
  if (env.contains("mode")) mode = env["mode"];
  if (given.contains("mode")) mode = given["mode"];
  for (const auto& [name, value] : presets().find(mode)->second) result[name] = value;
  for (const auto& [name, value] : env) result[name] = value;
  for (const auto& [name, value] : given) result[name] = value;
  result["mode"] = mode;
  *out = std::move(result);
  return true;
}

bool to_options(const OptionMap& given, Options* out, std::string* error) {
  OptionMap map;
  if (!resolve_options(given, "", &map, error)) return false;
  const auto size = [&](const char* name) { return static_cast<Bytes>(std::stoull(map[name])); };
  const auto number = [&](const char* name) { return std::stoi(map[name]); };
  const auto seconds = [&](const char* name) { return std::stod(map[name]); };
  const auto flag = [&](const char* name) { return map[name] == "true"; };
  const auto amount = [&](const char* name, Bytes* bytes, double* part) {
    Amount a;
    std::string ignored;  // canonical already
    parse_amount(map[name], &a, &ignored);
    *bytes = a.bytes;
    *part = a.part;
  };
  Options o;
  o.mode = map["mode"];
  amount("limit", &o.limit, &o.limit_part);
  amount("release_threshold", &o.release_threshold, &o.release_part);
  o.initial = size("initial");
  o.stream_ordered = flag("stream_ordered");
  o.segments = map["segments"] == "malloc"   ? SegmentSource::malloc
               : map["segments"] == "driver" ? SegmentSource::driver
                                             : SegmentSource::vmm;
  o.traits.exported = map["export"] == "posix_fd" ? driver::Export::posix_fd
                      : map["export"] == "fabric" ? driver::Export::fabric
                                                  : driver::Export::none;
  o.traits.rdma = flag("rdma");
  o.all_peers = map["peers"] == "all";
  if (!o.all_peers) parse_peers(map["peers"], &o.traits.peers, error);
  o.opportunistic = map["reuse"] != "deterministic";
  o.wait = map["reuse"] == "wait";
  o.legacy_fences = flag("legacy_fences");
  o.recover_stranded = flag("recover_stranded");
  o.wait_timeout = seconds("wait_timeout");
  o.fence_age = seconds("fence_age");
  o.stack_depth = number("stack_depth");
  o.native_depth = number("native_depth");
  o.sample_bytes = o.stack_depth == 0 ? size("sample_bytes") : 0;
  o.oom_retries = number("oom_retries");
  o.on_fault = map["on_fault"] == "raise"      ? Options::OnFault::raise
               : map["on_fault"] == "abort"    ? Options::OnFault::abort
               : map["on_fault"] == "callback" ? Options::OnFault::callback
                                               : Options::OnFault::report;
  o.regions = map["nvtx_regions"] == "on"    ? Options::Regions::on
              : map["nvtx_regions"] == "off" ? Options::Regions::off
                                             : Options::Regions::automatic;
  o.debug.track = flag("track");
  o.debug.guard_bytes = size("guard_bytes");
  o.debug.fill = flag("fill");
  o.debug.fill_edge_bytes = size("fill_edge_bytes");
  o.debug.quarantine_bytes = size("quarantine_bytes");
  o.debug.quarantine_blocks = static_cast<std::uint32_t>(number("quarantine_blocks"));
  o.debug.quarantine_age = seconds("quarantine_age");
  o.debug.count_untouched = flag("count_untouched");
  o.debug.check_bytes = size("check_bytes");
  o.debug.check_interval = seconds("check_interval");
  o.debug.check_every = static_cast<std::uint32_t>(std::max(1, number("check_every")));
  debug::PageGuardOptions& pages = o.debug.pages;
  using Which = debug::PageGuardOptions::Which;
  using Side = debug::PageGuardOptions::Side;
  pages.which = map["page_guards"] == "all"       ? Which::all
                : map["page_guards"] == "sampled" ? Which::sampled
                                                  : Which::off;
  pages.side = map["page_guard_side"] == "right"  ? Side::right
               : map["page_guard_side"] == "left" ? Side::left
                                                  : Side::random;
  pages.sample_bytes = std::max<Bytes>(1, size("page_guard_sample"));
  pages.smallest = size("page_guard_min");
  pages.largest = size("page_guard_max");
  pages.sites = map["page_guard_sites"];
  pages.cap = size("page_guard_cap");
  pages.kept = static_cast<std::uint32_t>(number("page_guard_kept"));
  pages.seed = static_cast<std::uint64_t>(number("page_guard_seed"));
  pages.records = map["page_guard_records"];
  o.debug.max_faults = static_cast<std::uint32_t>(number("max_faults"));
  o.debug.max_repeats = static_cast<std::uint32_t>(number("max_repeats"));
  *out = o;
  return true;
}

}  // namespace streampool::pool
