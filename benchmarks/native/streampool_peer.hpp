// streampool itself, through the C ABI, as a C++ program would; and what its ordering costs, one call at a time.
#pragma once

#include <memory>
#include <optional>
#include <streampool/pool.hpp>
#include <string>
#include <vector>

#include "driver_api.hpp"
#include "serve.hpp"

namespace bench {

class StreampoolPeer {
 public:
  using Stream = sp_stream;

  // Lasting streams, or handles that the pool is told nothing about.
  StreampoolPeer(const Arguments& arguments, bool lasting) : device_(arguments.device.c_str()), lasting_(lasting) {
    for (int i = 0; i < arguments.streams; ++i) streams_.push_back(device_.create_stream());
    if (arguments.device.rfind("cuda", 0) == 0) {
      api_ = std::make_unique<DriverApi>(arguments.ordinal());
      free_at_start_ = api_->free_bytes();
    }
    options_ = arguments.options;
    open();
  }
  ~StreampoolPeer() { forget(); }
  StreampoolPeer(const StreampoolPeer&) = delete;
  StreampoolPeer& operator=(const StreampoolPeer&) = delete;

  void restart() {
    settle();
    forget();
    settle();  // what forgetting recorded is done too: a pool with pending work would keep its memory
    pool_.reset();
    open();
  }
  void* alloc(std::size_t size, Stream stream) const {
    void* out = nullptr;
    sp::check(sp_alloc(pool_->get(), size, 0, stream, &out));
    return out;
  }
  void free(void* pointer, std::size_t, Stream stream) const { sp::check(sp_free(pool_->get(), pointer, stream)); }
  Stream stream(int i) const { return streams_.at(static_cast<std::size_t>(i)).get(); }
  void enter_thread() const {
    if (api_) api_->enter_thread();
  }
  void settle() const {
    if (api_) api_->synchronize();
  }
  // What the driver says is gone; on the simulated device what the pool says it holds, which is what it mapped.
  std::int64_t held() const {
    if (api_) return free_at_start_ - api_->free_bytes();
    sp_stats_t stats{};
    stats.struct_size = sizeof stats;
    sp::check(sp_stats(pool_->get(), &stats));
    return static_cast<std::int64_t>(stats.reserved);
  }
  std::string version() const { return sp_version(); }
  std::string ordering(std::int64_t operations);  // ordering.cpp

 private:
  void open() {
    pool_.emplace(device_, "device", options_.c_str());
    for (const sp::Stream& stream : streams_)
      if (lasting_) pool_->register_stream(stream);
  }
  void forget() const {
    for (const sp::Stream& stream : streams_)
      if (lasting_) sp_forget_stream(pool_->get(), stream.get());
  }
  sp::Device device_;
  std::string options_;
  bool lasting_;
  std::vector<sp::Stream> streams_;
  std::unique_ptr<DriverApi> api_;
  std::int64_t free_at_start_ = 0;
  std::optional<sp::Pool> pool_;
};

}  // namespace bench
