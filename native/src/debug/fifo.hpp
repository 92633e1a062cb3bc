// A queue in one piece of host memory, which only grows: a deque allocates for every other element of this size.
// Elements move when it grows. Imports nothing.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace streampool::debug {

template <typename T>
class Fifo {
 public:
  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](std::size_t i) { return items_[(first_ + i) & (items_.size() - 1)]; }
  const T& operator[](std::size_t i) const { return items_[(first_ + i) & (items_.size() - 1)]; }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }

  void push_back(T item) {
    if (size_ == items_.size()) grow();
    (*this)[size_++] = std::move(item);
  }
  void push_front(T item) {
    if (size_ == items_.size()) grow();
    first_ = (first_ + items_.size() - 1) & (items_.size() - 1);
    ++size_;
    front() = std::move(item);
  }
  T pop_front() {
    T item = std::move(front());
    first_ = (first_ + 1) & (items_.size() - 1);
    --size_;
    return item;
  }

 private:
  void grow() {
    constexpr std::size_t kFirst = 64;
    std::vector<T> larger(items_.empty() ? kFirst : 2 * items_.size());
    for (std::size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    items_ = std::move(larger);
    first_ = 0;
  }

  std::vector<T> items_;  // a power of two of them
  std::size_t first_ = 0, size_ = 0;
};

}  // namespace streampool::debug
