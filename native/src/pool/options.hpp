// The options table: every setting of a pool, once. Names, types, defaults and help; presets; parsing of texts.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "../base/types.hpp"
#include "../debug/options.hpp"
#include "../driver/driver.hpp"

namespace streampool::pool {

enum class OptionType : std::uint8_t { boolean, integer, size, amount, seconds, choice, text };

struct OptionRow {
  const char* name;
  OptionType type;
  const char* fallback;  // the default, as text
  const char* choices;   // "a|b|c" for choice
  const char* help;
  Bytes most = 0;  // largest size, 0: none
};

std::span<const OptionRow> option_table();
std::string_view option_type_word(OptionType type);

// mode -> option -> value: what a preset sets apart from the defaults.
using OptionMap = std::map<std::string, std::string, std::less<>>;
const std::map<std::string, OptionMap, std::less<>>& presets();

// Arguments over environment (`name=value:name=value`) over the mode's preset over defaults: every option, canonical.
// False with a sentence in `error` that names the option, the value and what is allowed.
bool resolve_options(const OptionMap& arguments, std::string_view environment, OptionMap* out, std::string* error);

// "2GiB", "512 MB", "4096". Decimal units are powers of 1000, binary ones of 1024. False with a sentence in `error`.
bool parse_size(std::string_view text, Bytes* out, std::string* error);

// Bytes, or a part of the device's memory: "80%", "0.8".
struct Amount {
  Bytes bytes = 0;
  double part = 0;  // above 0: of the device's memory, and `bytes` says nothing

  Bytes of(Bytes total) const;
};
bool parse_amount(std::string_view text, Amount* out, std::string* error);

// Where memory of kind `device` comes from: handles mapped into ranges, cuMemAlloc, or the driver's own stream-ordered
// pool. Pinned and managed memory comes in pieces from their own calls, `malloc`.
enum class SegmentSource : std::uint8_t { vmm, malloc, driver };
std::string_view source_word(SegmentSource source);

// The settings as the core uses them.
struct Options {
  std::string mode = "production";
  Bytes limit = 0;              // bounds reserved; 0: none
  double limit_part = 0;        // of the device's memory, in place of `limit`
  Bytes initial = 0;            // reserved when the pool is made
  bool stream_ordered = false;  // host-visible memory is touched in stream order only (R2)
  SegmentSource segments = SegmentSource::vmm;
  driver::MemoryTraits traits;   // of virtual memory
  bool all_peers = false;        // `traits.peers` is every device that can be given access
  Bytes granularity = 0;         // of virtual memory with these traits; known once the device is
  bool opportunistic = true;     // reuse of other streams' completed frees
  bool wait = true;              // wait edges, late in the ladder
  bool legacy_fences = true;     // the legacy stream may be fenced late in the ladder
  bool recover_stranded = true;  // context events
  double wait_timeout = 10;      // seconds
  double fence_age = 100e-6;    // seconds after which an unfenced free is fenced by the next call that names its stream
  Bytes release_threshold = 0;  // idle memory above this goes back at the pool's own trim points; 0: keep all
  double release_part = 0;      // of the device's memory, in place of `release_threshold`
  int stack_depth = 0;          // Python frames kept per allocation; 0: none
  int native_depth = 0;         // native frames kept beside them; 0: none
  Bytes sample_bytes = 0;       // one allocation in so many bytes keeps its call stack; 0: none
  int oom_retries = 3;          // of the user's out-of-memory callback
  enum class OnFault : std::uint8_t { report, raise, abort, callback } on_fault = OnFault::report;
  enum class Regions : std::uint8_t { off, automatic, on } regions = Regions::automatic;  // of NVTX
  debug::Options debug;
};
bool to_options(const OptionMap& map, Options* out, std::string* error);

}  // namespace streampool::pool
