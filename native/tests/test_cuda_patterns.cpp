// Cutting and collecting patterns on a stand-in for the CUDA driver's library, job by job. Needs no GPU. May import
// driver/ and what tests share.
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "cuda_stub.hpp"
#include "driver/cuda/library.hpp"
#include "driver/cuda/patterns.hpp"
#include "driver/pattern.hpp"

namespace streampool {
namespace {

using driver::Mismatch;
using driver::Range;
using testing::Opened;
using testing::Stub;

constexpr std::uint64_t kKey = 0x1234567890ABCDEFull;

// The pattern in `memory`, with some bytes changed, and what a check must say about it.
struct Scene {
  explicit Scene(std::size_t size) : memory(size + 64) {}
  Address at(std::size_t offset) { return reinterpret_cast<Address>(memory.data()) + offset; }
  std::vector<unsigned char> memory;
};

// Patterns that wait for the device for a hundredth of a second only.
struct Impatient {
  explicit Impatient(Stub& stub) {
    driver::OpenError kind = driver::OpenError::none;
    std::string error;
    const driver::cuda::Library* library = driver::cuda::load_library(&kind, &error);
    CHECK(library != nullptr);
    session.api = &library->api;
    CHECK_EQ(library->api.cuDevicePrimaryCtxRetain(&session.context, 0), 0);
    session.generation = stub->generation;
    scope.emplace(session);
    CHECK_EQ(patterns.start(session, &error), 0);
  }
  driver::cuda::Session session;
  std::optional<driver::cuda::Scope> scope;
  driver::cuda::Patterns patterns{0.01};
};

STREAMPOOL_TEST("cuda: a check of patterns names first, last, count and the bytes found, whatever the pieces") {
  Stub stub;
  const Opened opened;
  driver::Driver& device = *opened.driver;
  constexpr std::size_t kBig = 3 * driver::kPieceBytes + 1000;
  for (const Kind kind : {Kind::device, Kind::managed, Kind::pinned}) {
    Scene scene(kBig);
    // Neighbours, empty and unaligned ranges; the last spans four pieces.
    const std::vector<Range> ranges = {
        {scene.at(0), 1}, {scene.at(1), 0}, {scene.at(3), 30}, {scene.at(40), kBig - 40}};
    CHECK(device.pattern_fill(kind, ranges, kKey).ok());
    std::vector<Mismatch> found(3);
    CHECK(device.pattern_verify(kind, ranges, kKey, &found).ok());
    CHECK(found.empty());
    for (const std::size_t untouched : {1, 2, 33, 39}) CHECK_EQ(int{scene.memory[untouched]}, 0);

    const std::size_t piece_end = 40 + driver::kPieceBytes;
    for (const std::size_t offset : {std::size_t{0}, piece_end - 10, piece_end + 5, kBig - 1})
      scene.memory[offset] ^= 0x55;
    CHECK(device.pattern_verify(kind, ranges, kKey, &found).ok());
    CHECK_EQ(found.size(), std::size_t{2});
    CHECK(found[0].range == 0 && found[0].first == scene.at(0) && found[0].last == scene.at(0));
    CHECK(found[0].count == 1 && found[0].sample_size == 1 && found[0].sample[0] == scene.memory[0]);
    CHECK_EQ(found[1].range, 3u);
    CHECK_EQ(found[1].first, scene.at(piece_end - 10));
    CHECK_EQ(found[1].last, scene.at(kBig - 1));
    CHECK_EQ(found[1].count, Bytes{3});
    CHECK_EQ(int{found[1].sample_size}, 64);  // goes on over the end of the piece
    CHECK_EQ(std::memcmp(found[1].sample.data(), scene.memory.data() + piece_end - 10, 64), 0);
  }
}

STREAMPOOL_TEST("cuda: more ranges than one launch takes are checked in several") {
  Stub stub;
  const Opened opened;
  constexpr std::size_t kRanges = 40000;
  Scene scene(kRanges * 3);
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < kRanges; ++i) ranges.push_back({scene.at(i * 3), 2});
  CHECK(opened.driver->pattern_fill(Kind::device, ranges, kKey).ok());
  for (std::size_t i = 0; i < kRanges; i += 1000) scene.memory[i * 3 + 1] ^= 1;
  std::vector<Mismatch> found;
  CHECK(opened.driver->pattern_verify(Kind::device, ranges, kKey, &found).ok());
  CHECK_EQ(found.size(), kRanges / 1000);
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK_EQ(found[i].range, static_cast<std::uint32_t>(i * 1000));
    CHECK_EQ(found[i].first, scene.at(i * 3000 + 1));
  }
}

STREAMPOOL_TEST("cuda: a fill that finds no room on the device is called off and never happens later") {
  Stub stub;
  Impatient impatient(stub);
  driver::cuda::Patterns& patterns = impatient.patterns;

  Scene scene(1000);
  const Range range{scene.at(0), 1000};
  stub->busy = true;
  CHECK_EQ(patterns.fill({&range, 1}, kKey), 600);
  CHECK_EQ(patterns.fill({&range, 1}, kKey), 600);  // the first is still in the way
  stub->busy = false;
  std::vector<Mismatch> found;
  CHECK_EQ(patterns.verify({&range, 1}, kKey, &found), 0);  // runs what was called off, too
  CHECK_EQ(found.size(), std::size_t{1});
  for (const unsigned char byte : scene.memory) CHECK_EQ(int{byte}, 0);
  CHECK_EQ(patterns.fill({&range, 1}, kKey), 0);
  found.clear();
  CHECK_EQ(patterns.verify({&range, 1}, kKey, &found), 0);
  CHECK(found.empty());
  patterns.stop();
  CHECK_EQ(stub->live, 0);
}

STREAMPOOL_TEST("cuda: a job is queued whole, and what it found is read when it is done") {
  Stub stub;
  const Opened opened;
  Scene scene(300000);
  const Range all{scene.at(0), 300000};
  CHECK(opened.driver->pattern_fill(Kind::device, {&all, 1}, kKey).ok());
  scene.memory[1] ^= 1;
  scene.memory[270000] ^= 1;
  driver::PatternJob job{.key = kKey, .verify = {all}, .fill = {{scene.at(0), 10}}};
  stub->busy = true;
  opened.driver->pattern_start(&job);
  CHECK(!opened.driver->pattern_finish(&job, false));
  driver::PatternJob second{.key = kKey, .verify = {{scene.at(0), 10}}};
  opened.driver->pattern_start(&second);  // has a mailbox of its own
  stub->busy = false;
  CHECK(opened.driver->pattern_finish(&second, true));
  CHECK(second.status.ok() && second.verified && second.found.empty());  // after the first one's fill
  CHECK(opened.driver->pattern_finish(&job, false));
  CHECK(job.status.ok() && job.verified);
  CHECK_EQ(job.found.size(), std::size_t{1});
  CHECK_EQ(job.found[0].first, scene.at(1));
  CHECK_EQ(job.found[0].last, scene.at(270000));
  CHECK_EQ(job.found[0].count, Bytes{2});
}

STREAMPOOL_TEST("cuda: jobs beyond the mailboxes, and too large ones, are done when they are started") {
  Stub stub;
  const Opened opened;
  constexpr std::size_t kRanges = 20000;
  Scene scene(kRanges * 3);
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < kRanges; ++i) ranges.push_back({scene.at(i * 3), 2});
  driver::PatternJob large{.key = kKey, .fill = ranges};
  opened.driver->pattern_start(&large);
  CHECK(large.status.ok());
  CHECK_EQ(large.ticket, 0u);
  CHECK(opened.driver->pattern_finish(&large, false));
  std::vector<driver::PatternJob> jobs(8);
  for (driver::PatternJob& job : jobs) {
    job.key = kKey;
    job.verify = {ranges[0], ranges[kRanges - 1]};
    opened.driver->pattern_start(&job);
  }
  for (driver::PatternJob& job : jobs) {
    CHECK(opened.driver->pattern_finish(&job, true));
    CHECK(job.status.ok() && job.verified && job.found.empty());
  }
}

STREAMPOOL_TEST("cuda: a job that finds no room on the device is called off, and touches nothing later") {
  Stub stub;
  Impatient impatient(stub);
  driver::cuda::Patterns& patterns = impatient.patterns;
  Scene scene(1000);
  driver::PatternJob job{.key = kKey, .verify = {{scene.at(0), 500}}, .fill = {{scene.at(0), 1000}}};
  driver::cuda::Result result = 0;
  stub->busy = true;
  CHECK(patterns.start_job(&job, &result));
  CHECK_EQ(result, 0);
  CHECK(patterns.finish_job(&job, true, &result));
  CHECK_EQ(result, 600);
  CHECK(!job.verified);
  driver::PatternJob next{.key = kKey, .fill = {{scene.at(0), 10}}};
  CHECK(!patterns.start_job(&next, &result));  // the first is still in the way
  stub->busy = false;
  const Range range{scene.at(0), 1000};
  std::vector<Mismatch> found;
  CHECK_EQ(patterns.verify({&range, 1}, kKey, &found), 0);
  for (const unsigned char byte : scene.memory) CHECK_EQ(int{byte}, 0);
  CHECK(patterns.start_job(&next, &result));
  CHECK(patterns.finish_job(&next, true, &result));
  CHECK_EQ(result, 0);
  CHECK(scene.memory[9] != 0 && scene.memory[10] == 0);
  patterns.stop();
  CHECK_EQ(stub->live, 0);
}

STREAMPOOL_TEST("cuda: many threads may call one driver at once") {
  Stub stub;
  const Opened opened;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      std::vector<unsigned char> memory(5000);
      const Range range{reinterpret_cast<Address>(memory.data()), memory.size()};
      for (int i = 0; i < 50; ++i) {
        std::vector<Mismatch> found;
        if (!opened.driver->pattern_fill(Kind::device, {&range, 1}, kKey)) ++wrong;
        memory[static_cast<std::size_t>(i)] ^= 1;
        if (!opened.driver->pattern_verify(Kind::device, {&range, 1}, kKey, &found) || found.size() != 1) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace streampool
