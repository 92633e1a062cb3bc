// The C++ face of streampool: devices, streams, pools and blocks as owning objects, errors as exceptions. Header-only
// over the C ABI (streampool.h), so it works with any compiler and standard library; C++17.
//
//   sp::Device device("auto");
//   sp::Stream stream = device.create_stream();
//   sp::Pool pool(device, "device", "mode=debug:limit=2GiB");
//   sp::Block block = pool.allocate(4096, stream);
//   ...queue work on stream.get() with block.data()...
//   block.free(stream);                      // or leave it to the destructor
#pragma once

#include <streampool/streampool.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace sp {

// A failed call: its status and the library's sentence about it.
class Error : public std::runtime_error {
 public:
  Error(sp_status status, const char* text) : std::runtime_error(text), status_(status) {}
  sp_status status() const noexcept { return status_; }

 private:
  sp_status status_;
};

// Memory ran out: the device's, or what the pool's limit allows. what() has the whole account.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

// A free of something that is no live block of this pool; nothing was changed. status() says which kind.
class InvalidFreeError : public Error {
 public:
  using Error::Error;
};

// Throws what a status stands for; SP_OK passes.
inline void check(sp_status status) {
  switch (status) {
    case SP_OK: return;
    case SP_ERROR_HOST_MEMORY: throw std::bad_alloc();
    case SP_ERROR_OUT_OF_MEMORY: throw OutOfMemoryError(status, sp_last_error());
    case SP_ERROR_DOUBLE_FREE:
    case SP_ERROR_FOREIGN_FREE:
    case SP_ERROR_INTERIOR_FREE:
    case SP_ERROR_WRONG_POOL:
    case SP_ERROR_SIZE_MISMATCH:
    case SP_ERROR_TRAMPLED_RECORD: throw InvalidFreeError(status, sp_last_error());
    default: throw Error(status, sp_last_error());
  }
}

class Device;

// A stream made by Device::create_stream, destroyed with the object. A pool with which it was registered must have
// forgotten it by then. Programs with streams of their own pass those: every `stream` parameter takes a cudaStream_t.
class Stream {
 public:
  Stream(Stream&& other) noexcept : device_(std::move(other.device_)), stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    if (this != &other) {
      destroy();
      device_ = std::move(other.device_);
      stream_ = std::exchange(other.stream_, nullptr);
    }
    return *this;
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { destroy(); }

  sp_stream get() const noexcept { return stream_; }
  operator sp_stream() const noexcept { return stream_; }

 private:
  friend class Device;
  Stream(std::shared_ptr<sp_device> device, sp_stream stream) : device_(std::move(device)), stream_(stream) {}
  void destroy() noexcept {
    if (device_ && stream_ != nullptr) sp_stream_destroy(device_.get(), stream_);
  }

  std::shared_ptr<sp_device> device_;
  sp_stream stream_ = nullptr;
};

// A device: "cuda:N", "sim:N", or "auto" (a GPU where there is one, else the simulated device). Copies are one device.
class Device {
 public:
  explicit Device(const char* name = "auto") {
    sp_device* device = nullptr;
    check(sp_device_open(name, &device));
    device_ = std::shared_ptr<sp_device>(device, [](sp_device* d) { sp_device_close(d); });
  }
  std::string name() const { return sp_device_name(device_.get()); }
  // A stream that waits for no other.
  Stream create_stream() const {
    sp_stream stream = nullptr;
    check(sp_stream_create(device_.get(), &stream));
    return Stream(device_, stream);
  }
  sp_device* get() const noexcept { return device_.get(); }

 private:
  std::shared_ptr<sp_device> device_;
};

// One block of a pool, freed when the object ends. Keeps the pool's memory alive.
class Block {
 public:
  Block() = default;
  Block(Block&& other) noexcept
      : pool_(std::move(other.pool_)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  Block& operator=(Block&& other) noexcept {
    if (this != &other) {
      release();
      pool_ = std::move(other.pool_);
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() { release(); }

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }  // bytes, as asked for
  explicit operator bool() const noexcept { return data_ != nullptr; }

  // Frees in the order of `stream`: see sp_free.
  void free(sp_stream stream) {
    if (data_ == nullptr) return;
    check(sp_free(pool_.get(), data_, stream));
    data_ = nullptr;
    size_ = 0;
    pool_.reset();
  }
  // Work queued on `stream` until the block is freed may touch it.
  void record_stream(sp_stream stream) { check(sp_record_stream(pool_.get(), data_, stream)); }
  // Work that `event` covers may touch the block.
  void record_event(sp_event event) { check(sp_record_event(pool_.get(), data_, event)); }
  // Gives the block up: the caller frees the address with sp_free.
  void* detach() noexcept {
    size_ = 0;
    return std::exchange(data_, nullptr);
  }

 private:
  friend class Pool;
  Block(std::shared_ptr<sp_pool> pool, void* data, std::size_t size)
      : pool_(std::move(pool)), data_(data), size_(size) {}
  void release() noexcept {
    if (data_ != nullptr) sp_release(pool_.get(), data_);
    data_ = nullptr;
    size_ = 0;
  }

  std::shared_ptr<sp_pool> pool_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// A pool of one kind of memory ("device", "pinned", "managed") on one device. Copies are one pool; it is closed with
// the last of them and of its blocks.
class Pool {
 public:
  explicit Pool(const Device& device, const char* kind = "device", const char* options = "",
                const char* name = nullptr) {
    sp_pool* pool = nullptr;
    check(sp_pool_create(device.get(), kind, name, options, &pool));
    auto state = std::make_shared<State>();
    pool_ = std::shared_ptr<sp_pool>(pool, [state](sp_pool* p) { sp_pool_destroy(p); });
    state_ = std::move(state);
  }

  // Has `function` called for each fault, on a pool with option on_fault=callback: see sp_fault_function for where and
  // when. What it throws ends the program. Set it before other threads use the pool.
  void on_fault(std::function<void(const sp_fault_t&)> function) const {
    state_->on_fault = std::move(function);
    const bool any = static_cast<bool>(state_->on_fault);
    check(sp_set_fault_function(pool_.get(), any ? &Pool::call : nullptr, state_.get()));
  }

  // `size` and `alignment` in bytes; alignment 0 is the usual 256.
  Block allocate(std::size_t size, sp_stream stream, std::size_t alignment = 0) const {
    void* data = nullptr;
    check(sp_alloc(pool_.get(), size, alignment, stream, &data));
    return Block(pool_, data, size);
  }
  void register_stream(sp_stream stream) const { check(sp_register_stream(pool_.get(), stream)); }
  void forget_stream(sp_stream stream) const { check(sp_forget_stream(pool_.get(), stream)); }
  void reserve(std::size_t size) const { check(sp_reserve(pool_.get(), size)); }
  // Returns the bytes that went back to the driver.
  std::size_t trim(std::size_t keep_bytes = 0) const {
    std::size_t released = 0;
    check(sp_trim(pool_.get(), keep_bytes, &released));
    return released;
  }
  // Returns the number of faults this check found.
  std::uint64_t check_memory(double timeout = 10.0) const {
    std::uint64_t faults = 0;
    check(sp_check(pool_.get(), timeout, &faults));
    return faults;
  }
  sp_stats_t stats() const {
    sp_stats_t out{};
    out.struct_size = sizeof out;
    check(sp_stats(pool_.get(), &out));
    return out;
  }
  void close() const { check(sp_pool_close(pool_.get())); }
  sp_pool* get() const noexcept { return pool_.get(); }

 private:
  // Lives as long as the pool and its blocks.
  struct State {
    std::function<void(const sp_fault_t&)> on_fault;
  };
  static void call(sp_pool*, const sp_fault_t* fault, void* state) noexcept {
    static_cast<State*>(state)->on_fault(*fault);
  }

  std::shared_ptr<sp_pool> pool_;
  std::shared_ptr<State> state_;
};

}  // namespace sp
