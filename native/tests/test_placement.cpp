// Placement is pure numbers: size classes, slots, the page map, and extents against a simple model that is driven by
// random operations (STREAMPOOL_TEST_SEED=N repeats a run). May import placement/ only.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "placement/extent_map.hpp"
#include "placement/page_map.hpp"
#include "placement/slab.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::placement;

// -- size classes ----------------------------------------------------------------------------------------------------

STREAMPOOL_TEST("every size has the smallest class that holds it, and classes grow with sizes") {
  unsigned last = 0;
  for (Bytes size = 0; size <= kMaxSlotSize; ++size) {
    const unsigned cls = class_of(size);
    CHECK(cls < kClassCount);
    CHECK(cls == last || cls == last + 1);  // monotone, and no class is left out
    CHECK(class_size(cls) >= size);
    if (cls > 0) CHECK(class_size(cls - 1) < size);
    last = cls;
  }
  CHECK_EQ(last, kClassCount - 1);
  CHECK_EQ(class_size(last), kMaxSlotSize);
}

STREAMPOOL_TEST("a class rounds by at most an eighth of the size, or to the alignment of every pointer") {
  for (Bytes size = 1; size <= kMaxSlotSize; ++size) {
    const Bytes rounding = class_size(class_of(size)) - size;
    CHECK(rounding < kMinAlignment || rounding * 8 <= size);
  }
}

STREAMPOOL_TEST("class sizes are multiples of the alignment, and every power of two is one") {
  for (unsigned cls = 0; cls < kClassCount; ++cls) {
    CHECK_EQ(class_size(cls) % kMinAlignment, Bytes{0});
    CHECK_EQ(class_of(class_size(cls)), cls);
  }
  for (Bytes size = kMinAlignment; size <= kMaxSlotSize; size *= 2) CHECK_EQ(class_size(class_of(size)), size);
}

STREAMPOOL_TEST("a slab holds several slots, covers whole pages, and leaves at most a fifth of itself unused") {
  for (unsigned cls = 0; cls < kClassCount; ++cls) {
    CHECK_EQ(slab_size(cls) % kSlabUnit, Bytes{0});
    CHECK(slots_of(cls) >= 4);
    CHECK(slots_of(cls) <= kMaxSlots);
    const Bytes rest = slab_size(cls) - slots_of(cls) * class_size(cls);
    CHECK(rest < class_size(cls));
    CHECK(rest * 5 <= slab_size(cls));
  }
  CHECK_EQ(kSlabUnit, Bytes{1} << PageMap::kPageBits);
}

STREAMPOOL_TEST("the reciprocal finds the slot of every offset of every class exactly") {
  for (unsigned cls = 0; cls < kClassCount; ++cls) {
    const std::uint64_t reciprocal = slot_reciprocal(cls);
    for (Bytes offset = 0; offset < slab_size(cls); offset += kMinAlignment)
      CHECK_EQ((offset / kMinAlignment * reciprocal) >> 32, offset / class_size(cls));
  }
}

STREAMPOOL_TEST("a slot stack hands out every slot once, lowest address first, and takes slots from its middle") {
  for (unsigned cls = 0; cls < kClassCount; ++cls) {
    SlotStack stack;
    stack.fill(slots_of(cls));
    CHECK(stack.all_free());
    for (unsigned i = 0; i < slots_of(cls); ++i) CHECK_EQ(stack.pop(), i);
    CHECK(stack.empty());
    for (unsigned i = 0; i < slots_of(cls); ++i) stack.push(i);
    CHECK(stack.all_free());
    const unsigned middle = slots_of(cls) / 2;
    stack.remove_at(middle);
    std::vector<bool> seen(slots_of(cls));
    while (!stack.empty()) {
      const unsigned slot = stack.pop();
      CHECK(slot < slots_of(cls) && !seen[slot] && slot != middle);
      seen[slot] = true;
    }
    CHECK_EQ(std::count(seen.begin(), seen.end(), true), static_cast<std::ptrdiff_t>(slots_of(cls)) - 1);
  }
}

// -- the page map ----------------------------------------------------------------------------------------------------

// Addresses that no host mapping can have (user space ends at 2^47), so that the process's pools never meet them.
constexpr Address kFarAway = Address{1} << 47;
constexpr Bytes kPage = Bytes{1} << PageMap::kPageBits;

STREAMPOOL_TEST("the page map finds what was set, in every byte of each page that it covers and in no other") {
  alignas(8) int a = 0, b = 0;
  CHECK(PageMap::set(kFarAway + 2 * kPage, 3 * kPage, &a, PageMap::Tag::slab));
  CHECK(PageMap::set(kFarAway + 5 * kPage + 512, 1, &b, PageMap::Tag::large));
  CHECK(!PageMap::find(kFarAway + 2 * kPage - 1));
  for (const Address at : {kFarAway + 2 * kPage, kFarAway + 4 * kPage, kFarAway + 5 * kPage - 1}) {
    CHECK(PageMap::find(at).pointer() == &a);
    CHECK(PageMap::find(at).tag() == PageMap::Tag::slab);
  }
  for (const Address at : {kFarAway + 5 * kPage, kFarAway + 6 * kPage - 1}) {
    CHECK(PageMap::find(at).pointer() == &b);
    CHECK(PageMap::find(at).tag() == PageMap::Tag::large);
  }
  CHECK(!PageMap::find(kFarAway + 6 * kPage));
  PageMap::clear(kFarAway, 8 * kPage, &a);  // others' entries stay
  CHECK(!PageMap::find(kFarAway + 3 * kPage));
  CHECK(PageMap::find(kFarAway + 5 * kPage).pointer() == &b);
  PageMap::clear(kFarAway, 8 * kPage, &b);
  CHECK(!PageMap::find(kFarAway + 5 * kPage));
}

STREAMPOOL_TEST("the page map takes entries across the edge of a leaf, and a later entry replaces an earlier one") {
  alignas(8) int a = 0, b = 0;
  const Address edge = kFarAway + (Address{1} << (PageMap::kPageBits + PageMap::kLeafBits));
  CHECK(PageMap::set(edge - kPage, 2 * kPage, &a, PageMap::Tag::slab));
  CHECK(PageMap::set(edge, kPage, &b, PageMap::Tag::slab));
  CHECK(PageMap::find(edge - 1).pointer() == &a);
  CHECK(PageMap::find(edge).pointer() == &b);
  PageMap::clear(edge - kPage, 2 * kPage, &a);
  PageMap::clear(edge - kPage, 2 * kPage, &b);
  CHECK(!PageMap::find(edge - 1));
  CHECK(!PageMap::find(edge));
}

STREAMPOOL_TEST("addresses beyond the page map are refused, and found to be nobody's") {
  alignas(8) int a = 0;
  for (const Address at : {PageMap::kAddressLimit, PageMap::kAddressLimit + 1, ~Address{0}}) {
    CHECK(!PageMap::find(at));
    CHECK(!PageMap::set(at, 1, &a, PageMap::Tag::slab));
  }
  CHECK(!PageMap::set(PageMap::kAddressLimit - kPage, 2 * kPage, &a, PageMap::Tag::slab));
  CHECK(!PageMap::set(kPage, ~Bytes{0}, &a, PageMap::Tag::slab));
  CHECK(!PageMap::find(PageMap::kAddressLimit - kPage));
  CHECK(!PageMap::find(kPage));
  CHECK(PageMap::set(PageMap::kAddressLimit - kPage, kPage, &a, PageMap::Tag::large));  // the last one
  CHECK(PageMap::find(PageMap::kAddressLimit - 1).pointer() == &a);
  PageMap::clear(PageMap::kAddressLimit - kPage, kPage, &a);
}

STREAMPOOL_TEST("threads that set, find and clear beside each other see their own pages only") {
  constexpr int kThreads = 4, kRounds = 400, kPages = 16;
  // Untouched leaves, so that the threads race for making them; pages of the threads lie between each other.
  constexpr Address base = kFarAway + (Address{16} << (PageMap::kPageBits + PageMap::kLeafBits));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&wrong, t] {
      alignas(8) int mine = 0;
      for (int round = 0; round < kRounds; ++round) {
        const Address leaf = base + (static_cast<Address>(round % 4) << (PageMap::kPageBits + PageMap::kLeafBits));
        for (int i = 0; i < kPages; ++i) {
          const Address at = leaf + static_cast<Address>(i * kThreads + t) * kPage;
          if (!PageMap::set(at, kPage, &mine, PageMap::Tag::large)) wrong.fetch_add(1);
          if (PageMap::find(at + 77).pointer() != &mine) wrong.fetch_add(1);
        }
        // Clears the pages of all, and only one's own go.
        PageMap::clear(leaf, kPages * kThreads * kPage, &mine);
        for (int i = 0; i < kPages; ++i)
          if (PageMap::find(leaf + static_cast<Address>(i * kThreads + t) * kPage)) wrong.fetch_add(1);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

STREAMPOOL_TEST("threads that race for a part of the page map that is not there yet all end up with the same one") {
  constexpr int kThreads = 2;
  constexpr Address kLeaves = 200;
  constexpr Address base = kFarAway + (Address{1000} << (PageMap::kPageBits + PageMap::kLeafBits));
  const auto leaf = [](Address i) { return base + (i << (PageMap::kPageBits + PageMap::kLeafBits)); };
  alignas(8) int names[kThreads] = {};
  std::atomic<int> arrived{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      for (Address i = 0; i < kLeaves; ++i) {
        arrived.fetch_add(1);
        while (arrived.load() < kThreads * static_cast<int>(i + 1)) {
        }
        PageMap::set(leaf(i) + static_cast<Address>(t) * kPage, kPage, &names[t], PageMap::Tag::slab);
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (Address i = 0; i < kLeaves; ++i)
    for (int t = 0; t < kThreads; ++t) {
      CHECK(PageMap::find(leaf(i) + static_cast<Address>(t) * kPage).pointer() == &names[t]);
      PageMap::clear(leaf(i), kThreads * kPage, &names[t]);
    }
}

// -- extents against a model -----------------------------------------------------------------------------------------

struct Random {
  std::uint64_t state;
  std::uint64_t next() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
  }
  std::uint64_t below(std::uint64_t bound) { return (next() >> 11) % bound; }
};

std::uint64_t chosen_seed() {
  const char* text = std::getenv("STREAMPOOL_TEST_SEED");
  return text == nullptr ? 20261130 : std::strtoull(text, nullptr, 10) | 1;
}

constexpr int kOthers = 3;  // indexes besides that of unmapped addresses; the last one does not merge

// The slow and obvious way: a list of pieces by address.
struct Piece {
  Bytes size = 0;
  ExtentState state = ExtentState::unmapped;
  int index = -1;  // 0.. for free pieces
  std::uint64_t stamp = 0;
  Extent* extent = nullptr;
};

struct ExtentScene {
  ExtentMap map;
  FreeIndex indexes[kOthers] = {FreeIndex{true}, FreeIndex{true}, FreeIndex{false}};
  std::map<Address, Piece> pieces;
  std::map<Address, Bytes> ranges;
  Random random;
  std::uint64_t seed;

  explicit ExtentScene(std::uint64_t with) : random{with}, seed(with) {}

  bool inside_range(Address begin) const {  // not the first piece of its range
    return !ranges.contains(begin);
  }
  void add_range(Address begin, Bytes size) {
    const Range* range = map.add_range(begin, size);
    ranges[begin] = size;
    pieces[begin] = {size, ExtentState::unmapped, -1, 0, range->first};
  }

  // Cuts in the model and in the map.
  Extent* carve(Extent* from, Address begin, Bytes size, ExtentState state) {
    const Address old_begin = from->begin;
    const Piece old = pieces.at(old_begin);
    Extent* got = map.carve(from, begin, size, state);
    pieces.erase(old_begin);
    if (begin > old_begin) pieces[old_begin] = {begin - old_begin, old.state, old.index, old.stamp, nullptr};
    pieces[begin] = {size, state, -1, old.stamp, got};
    const Address end = old_begin + old.size;
    if (begin + size < end) pieces[begin + size] = {end - begin - size, old.state, old.index, old.stamp, nullptr};
    relink();
    return got;
  }
  void put(Extent* extent, ExtentState state, int index, std::uint64_t stamp) {
    const Address begin = extent->begin;
    if (state == ExtentState::unmapped)
      map.put_unmapped(extent);
    else
      map.put_free(extent, indexes[index], stamp);
    Piece& piece = pieces.at(begin);
    piece.state = state;
    piece.index = state == ExtentState::unmapped ? -1 : index;
    piece.stamp = state == ExtentState::unmapped ? 0 : stamp;
    if (state == ExtentState::unmapped || indexes[index].merges()) merge_around(begin);
    relink();
  }
  void merge_around(Address begin) {
    auto it = pieces.find(begin);
    const auto alike = [](const Piece& a, const Piece& b) { return a.state == b.state && a.index == b.index; };
    if (auto next = std::next(it);
        next != pieces.end() && inside_range(next->first) && alike(it->second, next->second)) {
      it->second.size += next->second.size;
      it->second.stamp = std::max(it->second.stamp, next->second.stamp);
      pieces.erase(next);
    }
    if (it != pieces.begin() && inside_range(it->first)) {
      auto previous = std::prev(it);
      if (alike(it->second, previous->second)) {
        previous->second.size += it->second.size;
        previous->second.stamp = std::max(previous->second.stamp, it->second.stamp);
        pieces.erase(it);
      }
    }
  }
  void hold(Extent* extent) {
    Piece& piece = pieces.at(extent->begin);
    map.hold(extent);
    piece.state = ExtentState::busy;
    piece.index = -1;
  }
  void join(Extent* first, Extent* last) {
    const Address begin = first->begin, end = last->end();
    map.join(first, last);
    auto it = pieces.find(begin);
    while (it->first + it->second.size < end) {
      auto next = std::next(it);
      it->second.size += next->second.size;
      it->second.stamp = std::max(it->second.stamp, next->second.stamp);
      pieces.erase(next);
    }
    relink();
  }

  // Which extent of the map stands for which piece: walked by address, everything compared on the way.
  void relink() {
    auto piece = pieces.begin();
    for (const Range* range : map.ranges()) {
      const Extent* previous = nullptr;
      for (Extent* e = range->first; e != nullptr; previous = e, e = e->next) {
        CHECK(piece != pieces.end());
        CHECK_EQ(e->begin, piece->first);
        CHECK_EQ(e->size, piece->second.size);
        CHECK(e->state == piece->second.state);
        CHECK(e->prev == previous);
        CHECK_EQ(e->stamp, piece->second.stamp);
        if (e->state == ExtentState::free) CHECK(e->index == &indexes[piece->second.index]);
        piece->second.extent = e;
        ++piece;
      }
    }
    CHECK(piece == pieces.end());
  }

  void check_indexes() {
    CHECK_EQ(map.validate(), std::string());
    CHECK_EQ(map.extent_count(), pieces.size());
    for (int i = -1; i < kOthers; ++i) {
      const FreeIndex& index = i < 0 ? map.unmapped() : indexes[i];
      std::size_t count = 0;
      Bytes bytes = 0, largest = 0;
      for (const auto& [begin, piece] : pieces)
        if (piece.state == (i < 0 ? ExtentState::unmapped : ExtentState::free) && piece.index == i) {
          ++count;
          bytes += piece.size;
          largest = std::max(largest, piece.size);
        }
      CHECK_EQ(index.count(), count);
      CHECK_EQ(index.empty(), count == 0);
      CHECK_EQ(index.free_bytes(), bytes);
      CHECK_EQ(index.largest(), largest);
      // By age: oldest first, both ways.
      std::size_t aged = 0;
      const Extent* older = nullptr;
      for (const Extent* e = index.oldest(); e != nullptr; older = e, e = e->newer, ++aged) {
        CHECK(e->index == &index);
        CHECK(e->older == older);
        if (older != nullptr) CHECK(older->stamp <= e->stamp);
      }
      CHECK_EQ(aged, count);
    }
  }

  // The smallest piece that fits, the lowest address among equals; by looking at all of them.
  Extent* slow_best_fit(int index, Bytes size, Bytes alignment) const {
    const Piece* best = nullptr;
    for (const auto& [begin, piece] : pieces) {
      if (piece.state != (index < 0 ? ExtentState::unmapped : ExtentState::free) || piece.index != index) continue;
      if (round_up(begin, alignment) + size > begin + piece.size) continue;
      if (best == nullptr || piece.size < best->size) best = &piece;
    }
    return best == nullptr ? nullptr : best->extent;
  }

  Extent* some(ExtentState state) {
    std::vector<Extent*> all;
    for (const auto& [begin, piece] : pieces)
      if (piece.state == state) all.push_back(piece.extent);
    return all.empty() ? nullptr : all[random.below(all.size())];
  }
  Bytes some_size(Bytes most) { return (1 + random.below(most / kExtentAlign)) * kExtentAlign; }

  void step() {
    constexpr Bytes kMost = 64 * kKiB;
    switch (random.below(10)) {
      case 0:
      case 1:
      case 2:
      case 3: {  // allocate by best fit
        const int index = static_cast<int>(random.below(kOthers + 1)) - 1;
        const Bytes size = some_size(kMost);
        const Bytes alignment = kExtentAlign << random.below(9);
        const FreeIndex& in = index < 0 ? map.unmapped() : indexes[index];
        Extent* found = in.best_fit(size, alignment);
        CHECK(found == slow_best_fit(index, size, alignment));
        if (found != nullptr)
          carve(found, round_up(found->begin, alignment), size,
                random.below(4) == 0 ? ExtentState::busy : ExtentState::taken);
        break;
      }
      case 4:
      case 5:
      case 6: {  // free
        Extent* extent = some(random.below(3) == 0 ? ExtentState::busy : ExtentState::taken);
        if (extent != nullptr)
          put(extent, ExtentState::free, static_cast<int>(random.below(kOthers)), random.below(50));
        break;
      }
      case 7: {  // into other hands
        if (Extent* extent = some(ExtentState::free)) hold(extent);
        break;
      }
      case 8: {  // give back to nobody
        if (Extent* extent = some(ExtentState::busy)) put(extent, ExtentState::unmapped, -1, 0);
        break;
      }
      case 9: {  // hold neighbours, and make them one; or cut an extent that is nobody's
        Extent* extent = some(ExtentState::free);
        if (extent == nullptr) break;
        hold(extent);
        Extent* last = extent;
        for (int i = 0; i < 3 && last->next != nullptr && last->next->state == ExtentState::free; ++i) {
          hold(last->next);
          last = last->next;
        }
        if (random.below(4) == 0 && extent->size > 2 * kExtentAlign) {
          carve(extent, extent->begin + kExtentAlign, kExtentAlign, ExtentState::taken);
          break;
        }
        join(extent, last);
        break;
      }
    }
  }
};

STREAMPOOL_TEST(
    "extents behave like a plain list of pieces under random cutting, freeing, holding, joining and unmapping") {
  const std::uint64_t first = chosen_seed();
  for (std::uint64_t seed = first; seed < first + 8; ++seed) {
    ExtentScene scene(seed * 2654435761u + 1);
    int step = 0;
    try {
      // Two ranges that touch (and must not merge) and one apart, of which one has an odd start.
      scene.add_range(4 * kMiB, kMiB);
      scene.add_range(5 * kMiB, 512 * kKiB);
      scene.add_range(64 * kMiB + kExtentAlign, 2 * kMiB);
      for (; step < 1500; ++step) {
        scene.step();
        scene.check_indexes();
      }
      // Everything back: each range is one unmapped piece again.
      while (Extent* e = scene.some(ExtentState::free)) scene.hold(e);
      while (Extent* e = scene.some(ExtentState::taken)) scene.put(e, ExtentState::unmapped, -1, 0);
      while (Extent* e = scene.some(ExtentState::busy)) scene.put(e, ExtentState::unmapped, -1, 0);
      scene.check_indexes();
      CHECK_EQ(scene.map.extent_count(), std::size_t{3});
    } catch (const testing::Failure& failure) {
      throw testing::Failure(std::string(failure.what()) + "\n  STREAMPOOL_TEST_SEED=" + std::to_string(seed) +
                             ", step " + std::to_string(step));
    }
  }
}

STREAMPOOL_TEST("best fit takes the smallest extent that holds the size, and the lowest address among equals") {
  ExtentMap map;
  FreeIndex index;
  Range* range = map.add_range(kGiB, kMiB);
  // Free pieces of these sizes with a taken one between each two.
  std::vector<Extent*> made;
  Address at = range->begin;
  for (const Bytes size : {8192u, 4096u, 16384u, 4096u, 1024u}) {
    made.push_back(
        map.carve(range->first->index != nullptr && made.empty() ? range->first : map.unmapped().best_fit(size, 512),
                  at, size, ExtentState::busy));
    at += size;
    map.carve(map.unmapped().best_fit(512, 512), at, 512, ExtentState::taken);
    at += 512;
  }
  for (Extent* e : made) map.put_free(e, index, 0);
  CHECK_EQ(map.validate(), std::string());
  CHECK(index.best_fit(512, 512) == made[4]);
  CHECK(index.best_fit(1536, 512) == made[1]);
  CHECK(index.best_fit(4096, 512) == made[1]);
  CHECK(index.best_fit(4608, 512) == made[0]);
  CHECK(index.best_fit(9000, 512) == made[2]);
  CHECK(index.best_fit(16384 + 512, 512) == nullptr);
  // made[0] starts at a multiple of 8192, the others do not.
  CHECK(index.best_fit(4096, 8192) == made[0]);
  // Larger alignment: only made[2] has a multiple of 16384 inside with enough behind it, or nobody has.
  for (const Bytes alignment : {1024u, 2048u, 4096u, 8192u, 16384u})
    if (const Extent* e = index.best_fit(1024, alignment)) CHECK(round_up(e->begin, alignment) + 1024 <= e->end());
}

STREAMPOOL_TEST("neighbours merge within one index only, and the latest stamp counts for the whole") {
  ExtentMap map;
  FreeIndex a, b, apart{false};
  Range* range = map.add_range(kGiB, 4 * 4096);
  Extent* e[4];
  for (Address i = 0; i < 4; ++i)
    e[i] = map.carve(i == 0 ? range->first : e[i - 1]->next, range->begin + i * 4096, 4096, ExtentState::taken);
  map.put_free(e[0], a, 5);
  map.put_free(e[1], b, 9);
  CHECK_EQ(map.extent_count(), std::size_t{4});
  Extent* merged = map.put_free(e[2], b, 3);
  CHECK_EQ(merged->begin, range->begin + 4096);
  CHECK_EQ(merged->size, Bytes{8192});
  CHECK_EQ(merged->stamp, std::uint64_t{9});
  CHECK_EQ(map.extent_count(), std::size_t{3});
  map.hold(merged);
  map.put_free(merged, apart, 1);
  map.put_free(e[3], apart, 2);  // an index that keeps its extents apart
  CHECK_EQ(apart.count(), std::size_t{2});
  CHECK_EQ(map.validate(), std::string());
  map.hold(e[3]);
  map.put_free(e[3], a, 8);
  map.hold(merged);
  Extent* whole = map.put_free(merged, a, 1);  // joins both sides
  CHECK_EQ(whole->size, range->size);
  CHECK_EQ(whole->stamp, std::uint64_t{8});
  CHECK_EQ(a.count(), std::size_t{1});
  CHECK_EQ(map.validate(), std::string());
}

STREAMPOOL_TEST("the extents of two ranges that touch stay two") {
  ExtentMap map;
  FreeIndex index;
  Range* low = map.add_range(kGiB, kMiB);
  Range* high = map.add_range(kGiB + kMiB, kMiB);
  for (Range* range : {high, low})
    map.put_free(map.carve(range->first, range->begin, kMiB, ExtentState::busy), index, 0);
  CHECK_EQ(index.count(), std::size_t{2});
  CHECK(index.best_fit(kMiB + 512, 512) == nullptr);
  CHECK(map.range_of(kGiB + kMiB - 1) == low);
  CHECK(map.range_of(kGiB + kMiB) == high);
  CHECK(map.range_of(kGiB - 1) == nullptr);
  CHECK(map.range_of(kGiB + 2 * kMiB) == nullptr);
  CHECK_EQ(map.validate(), std::string());
}

STREAMPOOL_TEST("a range that is removed leaves the others as they were, and its numbers are not used again") {
  ExtentMap map;
  std::vector<Range*> ranges;
  for (Address i = 0; i < 5; ++i) ranges.push_back(map.add_range((5 - i) * kGiB, kMiB));
  const std::uint32_t last = ranges[4]->number;
  map.remove_range(ranges[2]);
  CHECK_EQ(map.validate(), std::string());
  CHECK_EQ(map.ranges().size(), std::size_t{4});
  CHECK(map.range_of(3 * kGiB) == nullptr);
  CHECK(map.range_of(4 * kGiB) == ranges[1]);
  CHECK_EQ(map.unmapped().free_bytes(), 4 * kMiB);
  // As give-back does it: what goes is in the hands of a call.
  Extent* held = map.carve(ranges[0]->first, ranges[0]->begin, kMiB, ExtentState::busy);
  CHECK(held == ranges[0]->first);
  map.remove_range(ranges[0]);
  CHECK_EQ(map.extent_count(), std::size_t{3});
  CHECK(map.add_range(9 * kGiB, kMiB)->number > last);
  CHECK_EQ(map.validate(), std::string());
}

STREAMPOOL_TEST("a hundred thousand free extents are found by best fit, and merge into one again") {
  constexpr Address kCount = 100000;
  ExtentMap map;
  FreeIndex index;
  // Sizes from a fixed generator, a taken extent of 512 bytes behind each.
  Random random{7};
  std::vector<Bytes> sizes;
  Bytes total = 0;
  for (Address i = 0; i < kCount; ++i) {
    sizes.push_back((1 + random.below(2000)) * kExtentAlign);
    total += sizes.back() + kExtentAlign;
  }
  Range* range = map.add_range(kGiB, total);
  map.put_free(map.carve(range->first, range->begin, total, ExtentState::busy), index, 0);
  std::vector<Extent*> walls, holes;
  Address at = range->begin;
  for (const Bytes size : sizes) {
    holes.push_back(map.carve(index.best_fit(total - (at - range->begin), 512), at, size, ExtentState::taken));
    at += size;
    walls.push_back(map.carve(holes.back()->next, at, kExtentAlign, ExtentState::taken));
    at += kExtentAlign;
  }
  CHECK(index.empty());
  for (Address i = 0; i < kCount; ++i) map.put_free(holes[(i * 77777) % kCount], index, i);
  CHECK_EQ(index.count(), std::size_t{kCount});
  CHECK_EQ(map.validate(), std::string());
  for (Address i = 0; i < 2000; ++i) {
    const Bytes size = (1 + random.below(1990)) * kExtentAlign;
    Extent* found = index.best_fit(size, kExtentAlign);
    CHECK(found != nullptr && found->size >= size);
    CHECK(found->size < size + 64 * kExtentAlign);  // with so many to choose from, nearly exact
    Extent* taken = map.carve(found, found->begin, size, ExtentState::taken);
    map.put_free(taken, index, kCount + i);
  }
  CHECK_EQ(index.count(), std::size_t{kCount});
  for (Extent* wall : walls) map.put_free(wall, index, 2 * kCount);
  CHECK_EQ(index.count(), std::size_t{1});
  CHECK_EQ(index.largest(), total);
  CHECK_EQ(map.extent_count(), std::size_t{1});
  CHECK_EQ(map.validate(), std::string());
}

}  // namespace
