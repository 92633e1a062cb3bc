// Who holds memory: live blocks summed by the call stack that allocated them, of samples in production.
#include <algorithm>
#include <cmath>
#include <map>
#include <unordered_map>
#include <utility>

#include "core.hpp"

namespace streampool::pool {

// Of a sampled allocation. Without a call stack there is nothing to tell apart.
void Core::count_site(const AllocRequest& request) {
  if (request.stack == 0) return;
  const double size = static_cast<double>(request.size), weight = sampler_.weight(request.size);
  std::lock_guard lock(sites_mutex_);
  Site& site = sites_[{request.stack, bounded_tag(request.tag, tags_)}];
  site.bytes += weight;
  site.blocks += size > 0 ? weight / size : 1;
}

// A tag, or the word for those beyond what `known` has room for.
std::string Core::bounded_tag(std::string_view tag, Tags& known) {
  constexpr const char* kOtherTag = "_other";
  if (tag.empty() || known.contains(tag)) return std::string(tag);
  if (known.size() >= kMostTags) return kOtherTag;
  return *known.emplace(tag).first;
}

// When a live block was first there, as far as is known; what is seen stands in `next` for the next look. With the
// look's mutex held.
double Core::first_seen(const BlockRecord& record, double now,
                        std::unordered_map<const BlockRecord*, FirstSeen>& next) {
  if (options_.debug.track) {
    std::lock_guard lock(extra_lock(&record));
    return record.extra ? record.extra->allocated_time : now;
  }
  if (sampler_.mean() == 0) return now;  // each block comes here: too many to remember
  const std::uint32_t generation = BlockRecord::generation_of(record.word.load(std::memory_order_acquire));
  const auto known = first_seen_.find(&record);
  const bool same = known != first_seen_.end() && known->second.generation == generation;
  return (next[&record] = {generation, same ? known->second.at : now}).at;
}

// What live blocks of each call site hold, largest first: of the sampled ones, weighed, or of all where none are
// sampled.
std::vector<Holder> Core::holders(bool by_tag) {
  struct Sum {
    double bytes = 0, blocks = 0, since = 0, aged = 0;
  };
  const double now = driver_->now();
  std::map<SiteName, Sum> by_site;
  const auto tag_of = [&](const BlockRecord& record) -> std::string {
    if (!by_tag || (record.flags() & kHasExtra) == 0) return {};
    std::lock_guard lock(extra_lock(&record));
    return record.extra ? record.extra->tag : std::string();
  };
  {
    std::lock_guard lock(look_mutex_);
    std::unordered_map<const BlockRecord*, FirstSeen> next;
    for_each_live([&](BlockRecord& record) {
      if (sampler_.mean() != 0 && (record.flags() & kSampled) == 0) return;
      const double size = static_cast<double>(record.size), weight = sampler_.weight(record.size);
      const double since = first_seen(record, now, next);
      Sum& sum = by_site.try_emplace({record.stack(), tag_of(record)}, Sum{0, 0, now, 0}).first->second;
      sum.bytes += weight;
      sum.blocks += size > 0 ? weight / size : 1;
      sum.since = std::min(sum.since, since);
      if (now - since > kAged) sum.aged += weight;
    });
    first_seen_ = std::move(next);
  }
  const auto rounded = [](double value) { return static_cast<std::uint64_t>(std::llround(value)); };
  std::map<SiteName, Holder> sites;
  const auto of = [&](debug::StackId stack, const std::string& tag) -> Holder& {
    Holder& holder = sites[{stack, tag}];
    holder.stack = stack;
    holder.tag = tag;
    return holder;
  };
  {
    std::lock_guard lock(sites_mutex_);
    Tags known = by_tag ? tags_ : Tags();  // what is only looked at takes no place for good
    for (const auto& [name, sum] : by_site) {
      Holder& holder = of(name.first, bounded_tag(name.second, known));
      holder.bytes += rounded(sum.bytes);
      holder.blocks += rounded(sum.blocks);
      holder.oldest = std::max(holder.oldest, now - sum.since);
      holder.aged_bytes += rounded(sum.aged);
    }
    for (const auto& [name, site] : sites_) {
      Holder& holder = of(name.first, by_tag ? name.second : std::string());
      holder.allocated_bytes += rounded(site.bytes);
      holder.allocated_blocks += rounded(site.blocks);
    }
  }
  std::vector<Holder> all;
  for (const auto& [name, holder] : sites) all.push_back(holder);
  std::sort(all.begin(), all.end(), [](const Holder& a, const Holder& b) { return a.bytes > b.bytes; });
  return all;
}

}  // namespace streampool::pool
