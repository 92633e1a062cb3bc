// The index of free extents (placement/size_tree.hpp) against a sorted set. STREAMPOOL_TEST_SEED=N repeats a run.
#include <cstdlib>
#include <deque>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "placement/size_tree.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using placement::kExtentAlign;

struct Thing {
  Bytes size = 0;
  Address begin = 0;
  placement::SizeLinks<Thing> links;
};
using Tree = placement::SizeTree<Thing>;
using Key = std::tuple<Bytes, Address, Thing*>;

Key key(Thing* thing) { return {thing->size, thing->begin, thing}; }

}  // namespace

STREAMPOOL_TEST("a size tree gives what a sorted set gives, at the edges of its bins too") {
  const char* text = std::getenv("STREAMPOOL_TEST_SEED");
  const std::uint64_t seed = text == nullptr ? 20261130 : std::strtoull(text, nullptr, 10);
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t bound) { return random() % bound; };
  // A few sizes that come again and again, around powers of two and their quarters, from the smallest to the largest.
  std::vector<Bytes> sizes;
  for (unsigned bit = 9; bit < 47; ++bit)
    for (const Bytes quarter : {4, 5, 6, 7})
      for (const int by : {-1, 0, 1}) {
        const Bytes size = (Bytes{1} << bit) / 4 * quarter / kExtentAlign * kExtentAlign;
        if (size + static_cast<Bytes>(by) * kExtentAlign >= kExtentAlign && size != 0)
          sizes.push_back(size + static_cast<Bytes>(by) * kExtentAlign);
      }
  try {
    for (const std::size_t kinds : {std::size_t{1}, std::size_t{7}, sizes.size()}) {
      Tree tree;
      std::set<Key> sorted;
      std::deque<Thing> things;
      std::vector<Thing*> inside, outside;
      Address next = kExtentAlign;
      const auto size = [&] { return sizes[kinds == 1 ? 40 : kinds == 7 ? 40 + below(7) : below(sizes.size())]; };
      for (int i = 0; i < 6000; ++i) {
        const std::uint64_t what = below(10);
        if (what < 4 || inside.empty()) {
          if (outside.empty()) outside.push_back(&things.emplace_back());
          Thing* thing = outside.back();
          outside.pop_back();
          thing->size = size();
          thing->begin = below(2) != 0 ? next : below(1u << 20) * kExtentAlign + (Address{1} << 45);
          next += kExtentAlign;
          if (sorted.lower_bound({thing->size, thing->begin, nullptr}) !=
              sorted.lower_bound({thing->size, thing->begin + 1, nullptr})) {
            outside.push_back(thing);  // no two lie at one address
            continue;
          }
          tree.insert(thing);
          sorted.insert(key(thing));
          inside.push_back(thing);
        } else {
          const std::size_t at = below(inside.size());
          Thing* thing = inside[at];
          sorted.erase(key(thing));
          if (what < 7) {
            tree.erase(thing);
            inside[at] = inside.back();
            inside.pop_back();
            outside.push_back(thing);
          } else {
            const Address begin = next;
            next += kExtentAlign;
            tree.change(thing, begin, what == 7 ? size() : thing->size + kExtentAlign);
            sorted.insert(key(thing));
          }
        }
        CHECK_EQ(tree.count(), sorted.size());
        CHECK_EQ(tree.empty(), sorted.empty());
        CHECK(tree.largest() == (sorted.empty() ? nullptr : std::get<2>(*sorted.rbegin())));
        const Bytes asked = below(2) != 0 ? size() : size() + 1;
        const Address from = below(3) == 0 ? next / 2 : 0;
        const auto found = sorted.lower_bound({asked, from, nullptr});
        CHECK(tree.first_from(asked, from) == (found == sorted.end() ? nullptr : std::get<2>(*found)));
      }
      auto expected = sorted.begin();
      tree.for_each([&](Thing* thing) {
        CHECK(expected != sorted.end() && std::get<2>(*expected++) == thing);
        CHECK(tree.has(thing));
      });
      CHECK(expected == sorted.end());
      for (Thing* thing : outside) CHECK(!tree.has(thing));
      for (Thing* thing : inside) tree.erase(thing);
      CHECK(tree.empty() && tree.largest() == nullptr && tree.first_from(kExtentAlign) == nullptr);
    }
  } catch (const testing::Failure& failure) {
    throw testing::Failure(std::string(failure.what()) + "\n  STREAMPOOL_TEST_SEED=" + std::to_string(seed) +
                           " repeats it");
  }
}
