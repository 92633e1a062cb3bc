#include "unordered.hpp"

#include <utility>

namespace streampool::attach {

using pool::Errc;
using pool::Failure;

namespace {

bool is_undone(Errc errc) { return errc == Errc::capture || errc == Errc::driver; }

}  // namespace

std::unique_ptr<Unordered> Unordered::create(std::shared_ptr<pool::Core> core, Failure* failure) {
  if (!core->driver().capabilities().context_events) {
    failure->set(Errc::driver,
                 "memory without the order of a stream: the driver cannot say when all that is queued on the device is "
                 "done (cuCtxRecordEvent), so no free could be ordered; use a driver of CUDA 12.5 or newer");
    return nullptr;
  }
  driver::StreamHandle stream = 0;
  const driver::Status status = core->driver().stream_create(&stream);
  if (!status.ok()) {
    failure->cause = status;
    failure->lost = status.code == driver::Code::lost;
    failure->set(Errc::driver, "a private stream: " + driver::describe(status));
    return nullptr;
  }
  std::unique_ptr<Unordered> made(new Unordered(std::move(core), stream));
  if (made->core_->register_stream(stream, failure) != Errc::ok) return nullptr;
  return made;
}

Unordered::~Unordered() {
  catch_up();
  Failure ignored;
  core_->forget_stream(stream_, &ignored);
  core_->driver().stream_destroy(stream_);
}

Errc Unordered::allocate(Bytes size, debug::StackId stack, Address* out, Failure* failure) {
  catch_up();
  const bool capturing = core_->capture_known();
  pool::AllocRequest request;
  request.size = size;
  request.stream = stream_;
  request.settled = true;
  request.raw = request.owned = true;
  request.stack = stack;
  pool::BlockRef block;
  const Errc errc = core_->allocate(request, &block, failure);
  if (errc != Errc::ok) return errc;
  *out = block.address;
  if (capturing || core_->capture_known()) {
    std::lock_guard lock(mutex_);
    of_captures_.insert(block.address);
  }
  return Errc::ok;
}

Errc Unordered::free(Address address, debug::StackId stack, Failure* failure) {
  catch_up();
  bool of_capture = false;
  {
    std::lock_guard lock(mutex_);
    of_capture = of_captures_.erase(address) != 0;
  }
  if (!of_capture && !core_->capture_known()) {
    const Errc errc = free_now(address, nullptr, stack, failure);
    if (!is_undone(errc)) return errc;
    *failure = Failure();
  }
  pool::BlockRef block;
  const Errc errc = core_->retire(address, stack, &block, failure);
  if (errc != Errc::ok || of_capture) return errc;
  std::lock_guard lock(mutex_);
  later_.push_back({block, stack});
  waiting_.store(later_.size(), std::memory_order_release);
  return Errc::ok;
}

Errc Unordered::free_now(Address address, const pool::BlockRef* block, debug::StackId stack, Failure* failure) {
  const Errc errc = core_->record_everything(address, failure);
  if (is_undone(errc) && !failure->lost) return errc;
  *failure = Failure();  // a lost device's frees are harmless, and what is wrong with the block the free says and files
  pool::FreeRequest request;
  request.stack = stack;
  request.stream = stream_;
  return block != nullptr ? core_->free(*block, request, failure) : core_->free(address, request, failure);
}

void Unordered::catch_up() {
  if (waiting_.load(std::memory_order_acquire) == 0 || core_->capture_known()) return;
  std::vector<Later> later;
  {
    std::lock_guard lock(mutex_);
    later.swap(later_);
    waiting_.store(0, std::memory_order_release);
  }
  auto one = later.cbegin();
  for (Failure failure; one != later.cend(); ++one, failure = Failure()) {
    pool::Core::revive(one->block);
    if (!is_undone(free_now(one->block.address, &one->block, one->stack, &failure))) continue;
    pool::BlockRef again;
    core_->retire(one->block.address, one->stack, &again, &failure);
    break;  // nor would the others be done
  }
  if (one == later.cend()) return;
  std::lock_guard lock(mutex_);
  later_.insert(later_.begin(), one, later.cend());
  waiting_.store(later_.size(), std::memory_order_release);
}

}  // namespace streampool::attach
