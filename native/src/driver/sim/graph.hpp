// What a capture recorded: work and its order, to be launched any number of times.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace streampool::driver::sim {

// Held by its handle, by the capture while it is open, and by launched work until that has run. Destroyed outside the
// machine's lock: it tells the objects that it retains.
class Graph {
 public:
  // A piece of captured work: number `number` of a stream, after these pieces of streams (its own former one included).
  struct Piece {
    std::uint64_t stream = 0;
    std::uint64_t number = 0;
    std::vector<std::pair<std::uint64_t, std::uint64_t>> after;
    DeviceState* device = nullptr;
    std::string stream_name;
    std::shared_ptr<std::function<void()>> body;
    bool foreign = false;
    std::vector<Access> accesses, touched;  // what must be mapped; what counts for the race check
    std::string label;
    std::uint32_t stack = 0;
    std::shared_ptr<Gate> gate;
  };

  explicit Graph(std::weak_ptr<Machine> machine) : machine_(std::move(machine)) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  void retain(void (*ended)(void*), void* object) { objects_.emplace_back(ended, object); }

  std::vector<Piece> pieces;
  NodePtr last;  // the end of its latest launch: launches of one graph follow each other
  Clock done;    // of all launches

 private:
  std::weak_ptr<Machine> machine_;
  std::vector<std::pair<void (*)(void*), void*>> objects_;
};

}  // namespace streampool::driver::sim
