// A trace of allocations and frees, as `streampool bench` writes it for its workers, and its replay. Imports
// patterns.hpp.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "patterns.hpp"

namespace bench {

// Event i is an allocation (1) or the free (0) of block ids[i], of sizes[i] bytes, on stream streams[i].
struct Trace {
  std::vector<std::uint8_t> actions;
  std::vector<std::uint32_t> ids;
  std::vector<std::uint64_t> sizes;
  std::vector<std::uint32_t> streams;
  std::size_t blocks = 0;
  int stream_count = 0;
};

// The file: "SPTRACE1", the number of events (uint64), and the four arrays one after another, in the machine's order.
inline Trace read_trace(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (file == nullptr) throw std::runtime_error(path + " cannot be opened");
  const auto read = [&](void* to, std::size_t bytes) {
    if (std::fread(to, 1, bytes, file.get()) != bytes) throw std::runtime_error(path + " is cut short");
  };
  char magic[8];
  std::uint64_t events = 0;
  read(magic, sizeof magic);
  if (std::memcmp(magic, "SPTRACE1", sizeof magic) != 0) throw std::runtime_error(path + " is no trace for a worker");
  read(&events, sizeof events);
  Trace trace;
  trace.actions.resize(events);
  trace.ids.resize(events);
  trace.sizes.resize(events);
  trace.streams.resize(events);
  read(trace.actions.data(), events);
  read(trace.ids.data(), events * sizeof(std::uint32_t));
  read(trace.sizes.data(), events * sizeof(std::uint64_t));
  read(trace.streams.data(), events * sizeof(std::uint32_t));
  for (std::size_t i = 0; i < events; ++i) {
    trace.blocks = std::max<std::size_t>(trace.blocks, std::size_t{trace.ids[i]} + 1);
    trace.stream_count = std::max(trace.stream_count, static_cast<int>(trace.streams[i]) + 1);
  }
  return trace;
}

struct Replayed {
  double cold_ns = 0;           // an event of the first pass
  std::vector<double> warm_ns;  // an event of each later one
  Times batches;                // of the later ones
  std::int64_t held = -1;       // most bytes held from the driver; -1: not looked at, or not known
  std::uint64_t peak_live = 0;  // bytes
};

// The first pass and `warm` more, on one and the same peer. Blocks that live on are freed at the end of each pass, and
// the device settles, both untimed. `sample` looks at the bytes held after each allocation: such a run gives no times.
template <typename Peer>
Replayed replay(Peer& peer, const Trace& trace, int warm, bool sample) {
  using Stream = decltype(peer.stream(0));
  std::vector<Stream> streams;
  for (int i = 0; i < trace.stream_count; ++i) streams.push_back(peer.stream(i));
  struct Block {
    void* pointer = nullptr;
    std::size_t size = 0;
    std::uint32_t stream = 0;
  };
  std::vector<Block> blocks(trace.blocks);
  Replayed out;
  for (int pass = 0; pass <= warm; ++pass) {
    std::uint64_t live = 0;
    std::size_t next = 0;
    const Times times = timed(static_cast<std::int64_t>(trace.actions.size()), [&] {
      const std::size_t i = next++;
      Block& block = blocks[trace.ids[i]];
      if (trace.actions[i] != 0) {
        block = {peer.alloc(trace.sizes[i], streams[trace.streams[i]]), trace.sizes[i], trace.streams[i]};
        live += block.size;
        out.peak_live = std::max(out.peak_live, live);
        if (sample) out.held = std::max(out.held, peer.held());
      } else {
        peer.free(block.pointer, block.size, streams[trace.streams[i]]);
        live -= block.size;
        block.pointer = nullptr;
      }
    });
    for (Block& block : blocks) {
      if (block.pointer == nullptr) continue;
      peer.free(block.pointer, block.size, streams[block.stream]);
      block.pointer = nullptr;
    }
    peer.settle();
    if (pass == 0) {
      out.cold_ns = times.mean();
    } else {
      out.warm_ns.push_back(times.mean());
      out.batches.add(times);
    }
  }
  return out;
}

}  // namespace bench
