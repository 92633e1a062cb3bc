// See patterns.hpp.
#include "patterns.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "../pattern.hpp"
#include "errors.hpp"
#include "pattern_ptx.hpp"

namespace streampool::driver::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kMaxPieces = 16384;     // of one launch: up to 4 GiB; 1.5 MiB of pinned memory
constexpr unsigned kMailboxPieces = 8192;  // of one job: up to 2 GiB; 768 KiB of pinned memory
constexpr double kCallOffSeconds = 0.05;   // more than a block that has already started needs for its piece
constexpr auto kSpin = std::chrono::microseconds(200);  // most launches are done by then: poll without sleeping

// Cuts ranges into pieces, as many as fit one launch at a time.
class Cutter {
 public:
  explicit Cutter(std::span<const Range> ranges) : ranges_(ranges) {}

  bool done() const { return range_ >= ranges_.size(); }

  unsigned next(PatternPiece* pieces, unsigned most = kMaxPieces) {
    unsigned count = 0;
    while (count < most && range_ < ranges_.size()) {
      const Range& range = ranges_[range_];
      const Bytes left = range.size - done_;
      if (left == 0) {
        ++range_;
        done_ = 0;
        continue;
      }
      const Bytes size = std::min<Bytes>(left, kPieceBytes);
      PatternPiece& piece = pieces[count++];
      piece.begin = range.begin + done_;
      piece.size = static_cast<unsigned>(size);
      piece.beyond = static_cast<unsigned>(std::min<Bytes>(left - size, kSampleBytes));
      piece.bad = 0;
      piece.range = static_cast<unsigned>(range_);
      done_ += size;
    }
    return count;
  }

 private:
  std::span<const Range> ranges_;
  std::size_t range_ = 0;
  Bytes done_ = 0;
};

// Adds what was found in a piece to its range's mismatch; pieces come in the order of their ranges.
void add_finding(const PatternPiece& piece, std::vector<Mismatch>* out) {
  if (out->empty() || out->back().range != piece.range) {
    Mismatch mismatch;
    mismatch.range = piece.range;
    mismatch.first = piece.begin + piece.first;
    const unsigned sample = std::min(piece.size - piece.first + piece.beyond, kSampleBytes);
    mismatch.sample_size = static_cast<std::uint8_t>(sample);
    std::copy_n(piece.sample, sample, mismatch.sample.begin());
    out->push_back(mismatch);
  }
  Mismatch& mismatch = out->back();
  mismatch.last = piece.begin + piece.last;
  mismatch.count += piece.bad;
}

}  // namespace

Result Patterns::start(Session& session, std::string* error) {
  session_ = &session;
  const Api& api = *session.api;
  const auto failed = [&](Result result, const char* what) {
    if (error) *error = what;
    stop();
    return result;
  };
  if (const Result r = api.cuModuleLoadDataEx(&module_, kPatternPtx, 0, nullptr, nullptr)) {
    module_ = nullptr;
    return failed(r, "loading the pattern kernels");
  }
  if (const Result r = api.cuModuleGetFunction(&fill_, module_, "streampool_pattern_fill"))
    return failed(r, "finding the fill kernel");
  if (const Result r = api.cuModuleGetFunction(&verify_, module_, "streampool_pattern_verify"))
    return failed(r, "finding the check kernel");
  if (const Result r = api.cuStreamCreate(&stream_, kStreamNonBlocking)) {
    stream_ = nullptr;
    return failed(r, "making a private stream");
  }
  void* memory = nullptr;
  if (const Result r =
          api.cuMemHostAlloc(&memory, kMaxPieces * sizeof(PatternPiece), kHostAllocPortable | kHostAllocDeviceMap))
    return failed(r, "allocating 1.5 MiB of pinned memory");
  pieces_ = static_cast<PatternPiece*>(memory);
  if (const Result r = api.cuMemHostGetDevicePointer(&device_pieces_, memory, 0))
    return failed(r, "mapping pinned memory to the device");
  if (const Result r = make_mailboxes()) return failed(r, "making the mailboxes of the pattern kernels");
  // Kernels are loaded lazily, at their first launch, which may wait for the device: so launch each once, over nothing.
  pieces_[0] = PatternPiece{};
  for (const Function kernel : {fill_, verify_}) {
    const Result r = launch_and_wait(kernel, 1, 0);
    if (r != kSuccess && r != kNotReady) return failed(r, "a first launch of the pattern kernels");
  }
  return kSuccess;
}

Result Patterns::make_mailboxes() {
  const Api& api = *session_->api;
  for (Mailbox& box : mailboxes_) {
    void* memory = nullptr;
    if (const Result r = api.cuMemHostAlloc(&memory, kMailboxPieces * sizeof(PatternPiece),
                                            kHostAllocPortable | kHostAllocDeviceMap))
      return r;
    box.pieces = static_cast<PatternPiece*>(memory);
    if (const Result r = api.cuMemHostGetDevicePointer(&box.device_pieces, memory, 0)) return r;
    if (const Result r = api.cuEventCreate(&box.done, kEventDisableTiming)) {
      box.done = nullptr;
      return r;
    }
  }
  return kSuccess;
}

void Patterns::stop() {
  const Api& api = *session_->api;
  for (Mailbox& box : mailboxes_) {
    if (box.done) api.cuEventDestroy(box.done);
    if (box.pieces && box.state == Mailbox::State::free) api.cuMemFreeHost(box.pieces);
    box = Mailbox{};
  }
  if (pieces_ && !unfinished_) api.cuMemFreeHost(pieces_);
  if (stream_) api.cuStreamDestroy(stream_);
  if (module_ && !unfinished_) api.cuModuleUnload(module_);
  pieces_ = nullptr;
  stream_ = nullptr;
  module_ = nullptr;
}

Result Patterns::fill(std::span<const Range> ranges, std::uint64_t key) { return run(fill_, ranges, key, nullptr); }

Result Patterns::verify(std::span<const Range> ranges, std::uint64_t key, std::vector<Mismatch>* out) {
  return run(verify_, ranges, key, out);
}

Result Patterns::device_error() const {
  const Result result = session_->api->cuStreamQuery(stream_);
  return code_of(result) == Code::lost ? result : kSuccess;
}

Result Patterns::run(Function kernel, std::span<const Range> ranges, std::uint64_t key, std::vector<Mismatch>* out) {
  const std::lock_guard lock(mutex_);
  if (unfinished_) {
    if (const Result r = wait(wait_seconds_)) return r;
    unfinished_ = false;
  }
  Cutter cutter(ranges);
  while (const unsigned count = cutter.next(pieces_)) {
    if (const Result r = launch_and_wait(kernel, count, key)) return r;
    if (!out) continue;
    for (unsigned i = 0; i < count; ++i)
      if (pieces_[i].bad) add_finding(pieces_[i], out);
  }
  return kSuccess;
}

Result Patterns::launch(Function kernel, DevicePtr pieces, unsigned count, std::uint64_t key) {
  unsigned long long kernel_key = key;
  void* parameters[] = {&pieces, &kernel_key};
  return session_->api->cuLaunchKernel(kernel, count, 1, 1, kPatternThreads, 1, 1, 0, stream_, parameters, nullptr);
}

// One that nothing on the stream touches any more, or null.
Patterns::Mailbox* Patterns::free_mailbox() {
  for (Mailbox& box : mailboxes_) {
    if (box.state == Mailbox::State::left && session_->api->cuEventQuery(box.done) == kSuccess)
      box.state = Mailbox::State::free;
    if (box.state == Mailbox::State::free) return &box;
  }
  return nullptr;
}

bool Patterns::start_job(PatternJob* job, Result* result) {
  const std::lock_guard lock(mutex_);
  *result = kSuccess;
  if (unfinished_) return false;
  Mailbox* box = free_mailbox();
  if (box == nullptr) return false;
  Cutter verify(job->verify), fill(job->fill);
  box->verify = verify.next(box->pieces, kMailboxPieces);
  if (!verify.done()) return false;
  box->fill = fill.next(box->pieces + box->verify, kMailboxPieces - box->verify);
  if (!fill.done()) return false;
  if (box->verify != 0) *result = launch(verify_, box->device_pieces, box->verify, job->key);
  if (*result == kSuccess && box->fill != 0)
    *result = launch(fill_, box->device_pieces + box->verify * sizeof(PatternPiece), box->fill, job->key);
  if (*result == kSuccess) *result = session_->api->cuEventRecord(box->done, stream_);
  if (*result != kSuccess) {
    // What was launched may still run: the job is over, its mailbox only when the stream is there.
    call_off(box->pieces, box->verify + box->fill);
    unfinished_ = wait(kCallOffSeconds) != kSuccess;
    return true;
  }
  box->state = Mailbox::State::queued;
  job->ticket = static_cast<std::uint32_t>(box - mailboxes_.data()) + 1;
  return true;
}

bool Patterns::finish_job(PatternJob* job, bool wait, Result* result) {
  Mailbox& box = mailboxes_[job->ticket - 1];
  const auto query = [&] { return session_->api->cuEventQuery(box.done); };
  *result = wait ? wait_for(query, wait_seconds_) : query();
  if (*result == kNotReady && !wait) return false;
  const std::lock_guard lock(mutex_);
  if (*result == kNotReady) {
    call_off(box.pieces, box.verify + box.fill);
    if (wait_for(query, kCallOffSeconds) == kSuccess) {
      box.state = Mailbox::State::free;
    } else {
      box.state = Mailbox::State::left;
      unfinished_ = true;
    }
  } else {
    box.state = Mailbox::State::free;
  }
  job->ticket = 0;
  if (*result != kSuccess) return true;
  job->verified = true;
  for (unsigned i = 0; i < box.verify; ++i)
    if (box.pieces[i].bad) add_finding(box.pieces[i], &job->found);
  return true;
}

Result Patterns::launch_and_wait(Function kernel, unsigned count, std::uint64_t key) {
  if (const Result r = launch(kernel, device_pieces_, count, key)) return r;
  const Result result = wait(wait_seconds_);
  if (result != kNotReady) return result;
  call_off(pieces_, count);
  unfinished_ = wait(kCallOffSeconds) != kSuccess;
  return result;
}

Result Patterns::wait(double seconds) {
  return wait_for([this] { return session_->api->cuStreamQuery(stream_); }, seconds);
}

// Polls, because a synchronise call could not be ended. `kNotReady` when the time is over.
template <typename Query>
Result Patterns::wait_for(Query&& query, double seconds) {
  const auto begin = Clock::now();
  auto nap = std::chrono::microseconds(20);
  while (true) {
    const Result result = query();
    if (result != kNotReady) return result;
    if (ending() != Ending::no) return kDeinitialized;
    const auto waited = Clock::now() - begin;
    if (std::chrono::duration<double>(waited).count() > seconds) return kNotReady;
    if (waited < kSpin) continue;
    std::this_thread::sleep_for(nap);
    nap = std::min(nap * 2, std::chrono::microseconds(1000));
  }
}

// From here on no block that has not started yet touches memory; those that have are waited for next.
void Patterns::call_off(PatternPiece* pieces, unsigned count) {
  for (unsigned i = 0; i < count; ++i) std::atomic_ref<unsigned>(pieces[i].size).store(0, std::memory_order_seq_cst);
}

void fill_on_host(std::span<const Range> ranges, std::uint64_t key) {
  for (const Range& range : ranges) {
    const Address end = range.begin + range.size;
    Address at = range.begin;
    for (; at < end && (at & 3); ++at) *reinterpret_cast<unsigned char*>(at) = pattern_byte(at, key);
    for (; end - at >= 4; at += 4) *reinterpret_cast<unsigned int*>(at) = pattern_word(at, key);
    for (; at < end; ++at) *reinterpret_cast<unsigned char*>(at) = pattern_byte(at, key);
  }
}

void verify_on_host(std::span<const Range> ranges, std::uint64_t key, std::vector<Mismatch>* out) {
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const Address begin = ranges[i].begin;
    const Address end = begin + ranges[i].size;
    Mismatch found;
    const auto check = [&](Address at) {
      if (*reinterpret_cast<const unsigned char*>(at) == pattern_byte(at, key)) return;
      if (found.count++ == 0) found.first = at;
      found.last = at;
    };
    Address at = begin;
    for (; at < end && (at & 3); ++at) check(at);
    for (; end - at >= 4; at += 4) {
      if (*reinterpret_cast<const unsigned int*>(at) == pattern_word(at, key)) continue;
      for (Address byte = at; byte < at + 4; ++byte) check(byte);
    }
    for (; at < end; ++at) check(at);
    if (found.count == 0) continue;
    found.range = static_cast<std::uint32_t>(i);
    found.sample_size = static_cast<std::uint8_t>(std::min<Bytes>(end - found.first, found.sample.size()));
    std::copy_n(reinterpret_cast<const unsigned char*>(found.first), found.sample_size, found.sample.begin());
    out->push_back(found);
  }
}

}  // namespace streampool::driver::cuda
