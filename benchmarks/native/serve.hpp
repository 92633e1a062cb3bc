// A worker: one allocator in a process of its own, which measures what it is told to on standard input, a command a
// line, and answers with one JSON object a line. So many allocators can be measured in turns, and none is in another's
// way: a process has one heap, one set of threads and one CUDA context.
//
//   pair SIZE PAIRS THREADS own|one     ns of each thread, and quantiles of all batches
//   window SEED PAIRS
//   freelist PIECES ORDER OPERATIONS
//   replay FILE WARM times|bytes
//   ordering OPERATIONS                 what orders streams, one by one (streampool only)
//
// A Peer has alloc(size, stream), free(pointer, size, stream), stream(i), enter_thread(), settle() (the device has done
// all work), held() (bytes that the driver counts as gone since before the peer was made; -1: unknown), restart() (give
// everything back to the driver and begin as new) and version(). What fails throws.
#pragma once

#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "json.hpp"
#include "patterns.hpp"
#include "replay.hpp"
#include "threads.hpp"

namespace bench {

inline std::string spread(const Times& times) {
  return "\"p50\": " + number(times.quantile(0.5)) + ", \"p99\": " + number(times.quantile(0.99)) +
         ", \"left_out\": " + number(times.left_out());
}

inline std::string answer(const std::vector<Times>& threads) {
  std::string text = "{\"ns\": [";
  Times all;
  for (const Times& one : threads) {
    text += (&one == threads.data() ? "" : ", ") + number(one.mean());
    all.add(one);
  }
  return text + "], " + spread(all) + "}";
}

inline std::string answer(const Times& times) {
  return "{\"ns\": [" + number(times.mean()) + "], " + spread(times) + "}";
}

template <typename T>
T word(std::istringstream& line, const char* name) {
  T value{};
  if (!(line >> value)) throw std::runtime_error(std::string("the command lacks ") + name);
  return value;
}

template <typename Peer>
std::string measure(Peer& peer, const std::string& command) {
  std::istringstream line(command);
  const auto what = word<std::string>(line, "a pattern");
  const auto on = [&peer](auto stream) {
    return [&peer, stream](std::size_t size) { return peer.alloc(size, stream); };
  };
  const auto off = [&peer](auto stream) {
    return [&peer, stream](void* pointer, std::size_t size) { peer.free(pointer, size, stream); };
  };
  if (what == "pair") {
    const auto size = word<std::size_t>(line, "a size");
    const auto pairs = word<std::int64_t>(line, "a number of pairs");
    const auto threads = word<int>(line, "a number of threads");
    const bool one = word<std::string>(line, "own or one") == "one";
    return answer(together(
        threads, [&](int) { peer.enter_thread(); },
        [&](int thread) {
          const auto stream = peer.stream(one ? 0 : thread);
          return pair(size, pairs, on(stream), off(stream), threads == 1 ? Company::alone : Company::others);
        }));
  }
  if (what == "window") {
    const auto seed = word<unsigned>(line, "a seed");
    const auto pairs = word<std::int64_t>(line, "a number of pairs");
    const auto stream = peer.stream(0);
    return answer(window(seed, pairs, on(stream), off(stream)));
  }
  if (what == "freelist") {
    const auto pieces = word<std::size_t>(line, "a number of pieces");
    Order order{};
    if (!order_of(word<std::string>(line, "an order"), &order)) throw std::runtime_error("no such order");
    const auto operations = word<std::int64_t>(line, "a number of operations");
    const auto stream = peer.stream(0);
    const FreelistTimes times = freelist(pieces, order, operations, on(stream), off(stream));
    return "{\"alloc\": " + answer(times.alloc) + ", \"free\": " + answer(times.free) + "}";
  }
  if (what == "replay") {
    const Trace trace = read_trace(word<std::string>(line, "a file"));
    const auto warm = word<int>(line, "a number of passes");
    const bool bytes = word<std::string>(line, "times or bytes") == "bytes";
    peer.restart();
    const Replayed done = replay(peer, trace, warm, bytes);
    std::string text = "{\"cold\": " + number(done.cold_ns) + ", \"ns\": [";
    for (std::size_t i = 0; i < done.warm_ns.size(); ++i) text += (i == 0 ? "" : ", ") + number(done.warm_ns[i]);
    return text + "], " + spread(done.batches) + ", \"held\": " + std::to_string(done.held) +
           ", \"peak_live\": " + std::to_string(done.peak_live) + "}";
  }
  if constexpr (requires { peer.ordering(std::int64_t{}); })
    if (what == "ordering") return peer.ordering(word<std::int64_t>(line, "a number of operations"));
  throw std::runtime_error("this worker does not know the command '" + what + "'");
}

// Says hello, then answers until standard input ends.
template <typename Peer>
int serve(Peer& peer) {
  std::cout << "{\"ready\": true, \"version\": " << quoted(peer.version()) << "}" << std::endl;
  for (std::string command; std::getline(std::cin, command);) {
    try {
      std::cout << measure(peer, command) << std::endl;
    } catch (const std::exception& error) {
      std::cout << "{\"error\": " << quoted(error.what()) << "}" << std::endl;
    }
  }
  return 0;
}

// Makes the peer and serves; a peer that cannot be made says why.
template <typename Make>
int run_worker(const Make& make) {
  try {
    return make();
  } catch (const std::exception& error) {
    std::cout << "{\"error\": " << quoted(error.what()) << "}" << std::endl;
    return 1;
  }
}

// What a worker is started with: PEER [--device D] [--options O] [--streams N] [--library PATH].
struct Arguments {
  std::string peer, device = "sim:0", options, library;
  int streams = 1;

  bool parse(int argc, char** argv) {
    if (argc < 2) return false;
    peer = argv[1];
    for (int i = 2; i + 1 < argc; i += 2) {
      const std::string name = argv[i];
      const std::string value = argv[i + 1];
      if (name == "--device")
        device = value;
      else if (name == "--options")
        options = value;
      else if (name == "--library")
        library = value;
      else if (name == "--streams")
        streams = std::max(1, std::atoi(value.c_str()));
      else
        return false;
    }
    return argc % 2 == 0;
  }
  // "cuda:1" is 1.
  int ordinal() const {
    const std::size_t colon = device.find(':');
    return device.rfind("cuda", 0) != 0 || colon == std::string::npos ? 0 : std::atoi(device.c_str() + colon + 1);
  }
};

}  // namespace bench
