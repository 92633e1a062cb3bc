// What the program says it is doing: named scopes, entered and left. A fault's window names those that
// were open in it. One list for the process, of the latest scopes only. Moments number entries and exits, so that they
// compare whatever clock a device has. Imports nothing. Thread-safe; never throws.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace streampool::debug {

inline constexpr std::size_t kScopesKept = 4096;
inline constexpr std::size_t kScopeNameBytes = 200;  // longer names are cut

using Moment = std::uint64_t;

Moment now_moment() noexcept;
// Gives the scope's number, by which any thread leaves it: tasks of one thread need not nest. 0: it could not be kept.
// Leaving twice is harmless.
std::uint64_t enter_scope(std::string_view name) noexcept;
void leave_scope(std::uint64_t number) noexcept;
// Names of the scopes that were open at some moment in (from, to], in the order of their entry, outer
// ones first; entered more than once: "name (3 x)". At most `most`, the latest, and a last line that says how many
// more.
std::vector<std::string> scopes_between(Moment from, Moment to, std::size_t most);

}  // namespace streampool::debug
