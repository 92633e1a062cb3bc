// Things with a size and an address, in order of both: what is needed first is the least that is not smaller than a
// size.
//
// Bins hold the sizes between two quarters of a power of two, a bit for each says whether it has any, and each is a
// treap (R. Seidel, C. Aragon, "Randomized search trees", 1996) whose links lie in the things themselves. So the usual
// bin, of one or two, is found in a few instructions, no host memory comes and goes, and a hundred thousand cost a
// dozen steps.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "../base/types.hpp"

namespace streampool::placement {

inline constexpr Bytes kExtentAlign = 512;

// In a thing that stands in a SizeTree; nobody else's.
template <typename Node>
struct SizeLinks {
  Node* left = nullptr;
  Node* right = nullptr;
  std::uint32_t rank = 0;  // of a heap by rank: parents have no smaller one
};

// `Node` has `begin`, `size` (at least kExtentAlign) and `links`, which do not change while it is in the tree.
template <typename Node>
class SizeTree {
 public:
  bool empty() const { return count_ == 0; }
  std::size_t count() const { return count_; }

  void insert(Node* node) {
    const unsigned bin = bin_of(node->size);
    node->links.rank = rank_of(node->begin);
    Node** at = &bins_[bin];
    while (*at != nullptr && (*at)->links.rank >= node->links.rank)
      at = before(*node, **at) ? &(*at)->links.left : &(*at)->links.right;
    // What hung here goes to the left or the right of it.
    Node* rest = *at;
    *at = node;
    Node** left = &node->links.left;
    Node** right = &node->links.right;
    while (rest != nullptr) {
      if (before(*rest, *node)) {
        *left = rest;
        left = &rest->links.right;
        rest = *left;
      } else {
        *right = rest;
        right = &rest->links.left;
        rest = *right;
      }
    }
    *left = *right = nullptr;
    used_[bin / kWord] |= std::uint64_t{1} << bin % kWord;
    ++count_;
  }

  void erase(Node* node) {
    const unsigned bin = bin_of(node->size);
    Node** at = &bins_[bin];
    while (*at != node) at = before(*node, **at) ? &(*at)->links.left : &(*at)->links.right;
    Node* left = node->links.left;
    Node* right = node->links.right;
    while (left != nullptr && right != nullptr) {
      if (left->links.rank >= right->links.rank) {
        *at = left;
        at = &left->links.right;
        left = *at;
      } else {
        *at = right;
        at = &right->links.left;
        right = *at;
      }
    }
    *at = left != nullptr ? left : right;
    if (bins_[bin] == nullptr) used_[bin / kWord] &= ~(std::uint64_t{1} << bin % kWord);
    --count_;
  }

  // The node takes another size and address. Most often it keeps its place.
  void change(Node* node, Address begin, Bytes size) {
    const unsigned bin = bin_of(node->size);
    if (bin_of(size) == bin && bins_[bin] == node && node->links.left == nullptr && node->links.right == nullptr) {
      node->begin = begin;
      node->size = size;
      return;
    }
    erase(node);
    node->begin = begin;
    node->size = size;
    insert(node);
  }

  // The first that is not before (size, begin); null: none.
  Node* first_from(Bytes size, Address begin = 0) const {
    const unsigned bin = bin_of(size);
    Node* best = nullptr;
    for (Node* node = bins_[bin]; node != nullptr;) {
      const bool fits = node->size != size ? node->size > size : node->begin >= begin;
      if (fits) best = node;
      node = fits ? node->links.left : node->links.right;
    }
    if (best != nullptr) return best;
    // The least of the next bin that has any.
    unsigned word = (bin + 1) / kWord;
    if (word == kWords) return nullptr;
    std::uint64_t bits = used_[word] & ~std::uint64_t{0} << (bin + 1) % kWord;
    while (bits == 0) {
      if (++word == kWords) return nullptr;
      bits = used_[word];
    }
    Node* node = bins_[word * kWord + static_cast<unsigned>(std::countr_zero(bits))];
    while (node->links.left != nullptr) node = node->links.left;
    return node;
  }

  Node* largest() const {
    for (unsigned word = kWords; word-- > 0;) {
      if (used_[word] == 0) continue;
      Node* node = bins_[word * kWord + static_cast<unsigned>(std::bit_width(used_[word]) - 1)];
      while (node->links.right != nullptr) node = node->links.right;
      return node;
    }
    return nullptr;
  }

  bool has(const Node* node) const {
    const Node* at = bins_[bin_of(node->size)];
    while (at != nullptr && at != node) at = before(*node, *at) ? at->links.left : at->links.right;
    return at != nullptr;
  }

  // In order. `function` leaves the tree as it is.
  template <typename Function>
  void for_each(Function&& function) const {
    for (unsigned word = 0; word < kWords; ++word)
      for (std::uint64_t bits = used_[word]; bits != 0; bits &= bits - 1)
        walk(bins_[word * kWord + static_cast<unsigned>(std::countr_zero(bits))], function);
  }

 private:
  static constexpr unsigned kWord = 64;
  static constexpr unsigned kQuarters = 2;  // bits behind the leading one that tell bins apart
  static constexpr unsigned kBins = 160;    // up to 2^48 bytes
  static constexpr unsigned kWords = (kBins + kWord - 1) / kWord;

  static unsigned bin_of(Bytes size) {
    const std::uint64_t units = size / kExtentAlign;
    const unsigned width = static_cast<unsigned>(std::bit_width(units));
    if (width <= kQuarters) return static_cast<unsigned>(units);
    const unsigned shift = width - 1 - kQuarters;
    return (shift << kQuarters) + static_cast<unsigned>(units >> shift);
  }
  static bool before(const Node& a, const Node& b) { return a.size != b.size ? a.size < b.size : a.begin < b.begin; }
  // Like drawn by lot, and the same in each run.
  static std::uint32_t rank_of(Address begin) {
    return static_cast<std::uint32_t>(begin / kExtentAlign * 0x9E3779B97F4A7C15u >> 32);
  }
  template <typename Function>
  static void walk(Node* node, Function& function) {
    for (; node != nullptr; node = node->links.right) {
      walk(node->links.left, function);
      function(node);
    }
  }

  std::array<Node*, kBins> bins_{};
  std::array<std::uint64_t, kWords> used_{};
  std::size_t count_ = 0;
};

}  // namespace streampool::placement
