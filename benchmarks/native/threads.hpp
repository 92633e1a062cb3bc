// Threads that start a loop together. Imports patterns.hpp.
#pragma once

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include "patterns.hpp"

namespace bench {

// `body(thread)` gives what its loop took; `enter(thread)` comes before, untimed. With one thread no thread is started,
// since glibc's malloc is dearer for ever in a process that once had two. Throws what a body threw.
template <typename Enter, typename Body>
std::vector<Times> together(int threads, const Enter& enter, const Body& body) {
  std::vector<Times> times(static_cast<std::size_t>(threads));
  if (threads == 1) {
    enter(0);
    times[0] = body(0);
    return times;
  }
  std::vector<std::exception_ptr> problems(times.size());
  std::vector<std::thread> running;
  std::atomic<int> ready{0};
  for (int t = 0; t < threads; ++t)
    running.emplace_back([&, t] {
      const auto place = static_cast<std::size_t>(t);
      try {
        enter(t);
      } catch (...) {
        problems[place] = std::current_exception();
      }
      ready.fetch_add(1);
      while (ready.load() < threads) std::this_thread::yield();
      if (problems[place] != nullptr) return;
      try {
        times[place] = body(t);
      } catch (...) {
        problems[place] = std::current_exception();
      }
    });
  for (std::thread& thread : running) thread.join();
  for (const std::exception_ptr& problem : problems)
    if (problem != nullptr) std::rethrow_exception(problem);
  return times;
}

inline double slowest(const std::vector<Times>& times) {
  double worst = 0;
  for (const Times& one : times) worst = std::max(worst, one.mean());
  return worst;
}

}  // namespace bench
