#include "scopes.hpp"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>

namespace streampool::debug {

namespace {

struct Scope {
  std::string name;
  Moment begin = 0;
  Moment end = 0;  // 0: open
};

// Scope n of the process is scopes[n - first]. Leaked: threads may end after statics.
struct Table {
  std::mutex mutex;
  std::deque<Scope> scopes;
  std::uint64_t first = 1;
};
Table& table() {
  static Table* t = new Table;
  return *t;
}

std::atomic<Moment> g_moment{1};

// At most so much of a name, and no half of a character (UTF-8).
std::string_view cut(std::string_view name) {
  std::size_t size = std::min(name.size(), kScopeNameBytes);
  while (size < name.size() && size > 0 && (static_cast<unsigned char>(name[size]) & 0xC0) == 0x80) --size;
  return name.substr(0, size);
}

}  // namespace

Moment now_moment() noexcept { return g_moment.load(std::memory_order_relaxed); }

std::uint64_t enter_scope(std::string_view name) noexcept try {
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  t.scopes.push_back({std::string(cut(name)), now_moment() + 1, 0});
  g_moment.fetch_add(1, std::memory_order_relaxed);
  // The oldest goes, whether it is open or not: what is never left must not keep all others.
  if (t.scopes.size() > kScopesKept) {
    t.scopes.pop_front();
    ++t.first;
  }
  return t.first + t.scopes.size() - 1;
} catch (...) {  // no memory: windows are named without it
  return 0;
}

void leave_scope(std::uint64_t number) noexcept {
  Table& t = table();
  const std::lock_guard lock(t.mutex);
  if (number < t.first || number - t.first >= t.scopes.size()) return;
  Scope& scope = t.scopes[static_cast<std::size_t>(number - t.first)];
  if (scope.end == 0) scope.end = g_moment.fetch_add(1, std::memory_order_relaxed) + 1;
}

std::vector<std::string> scopes_between(Moment from, Moment to, std::size_t most) {
  struct Named {
    std::string name;
    std::size_t count = 0;
  };
  std::vector<Named> found;
  {
    Table& t = table();
    const std::lock_guard lock(t.mutex);
    for (const Scope& scope : t.scopes) {
      if (scope.begin > to || (scope.end != 0 && scope.end <= from)) continue;
      const auto at =
          std::find_if(found.begin(), found.end(), [&](const Named& known) { return known.name == scope.name; });
      if (at != found.end())
        ++at->count;
      else
        found.push_back({scope.name, 1});
    }
  }
  std::vector<std::string> out;
  const std::size_t left_out = found.size() - std::min(found.size(), most);
  for (std::size_t i = left_out; i < found.size(); ++i)
    out.push_back(found[i].count == 1 ? found[i].name : found[i].name + " (" + std::to_string(found[i].count) + " x)");
  if (left_out != 0) out.push_back("and " + std::to_string(left_out) + " earlier ones");
  return out;
}

}  // namespace streampool::debug
