// Allocates on the device that is named ("auto": a GPU where there is one), lets a block cross streams, and shows what
// the pool says of it. No CUDA toolkit is needed to build it.
#include <cstdio>
#include <exception>
#include <streampool/pool.hpp>

int main(int argc, char** argv) {
  try {
    const sp::Device device(argc > 1 ? argv[1] : "auto");
    const sp::Stream first = device.create_stream(), second = device.create_stream();
    const sp::Pool pool(device, "device", "mode=debug:limit=1GiB");
    pool.register_stream(first);  // a promise that it lives until forget_stream: no driver call on alloc and free
    pool.register_stream(second);

    sp::Block block = pool.allocate(std::size_t{1} << 20, first);
    std::printf("%s: %zu bytes at %p\n", device.name().c_str(), block.size(), block.data());
    block.record_stream(second);  // work queued on `second` uses it too, until it is freed
    void* const address = block.data();
    block.free(first);

    try {
      sp::check(sp_free(pool.get(), address, first));
      std::printf("a second free went unnoticed\n");
      return 1;
    } catch (const sp::InvalidFreeError& error) {
      std::printf("refused: %s (%s)\n", sp_status_name(error.status()), error.what());
    }

    try {
      pool.allocate(std::size_t{2} << 30, first);
      std::printf("the limit was ignored\n");
      return 1;
    } catch (const sp::OutOfMemoryError& error) {
      std::printf("refused: %s\n", error.what());
    }

    {
      const sp::Block small = pool.allocate(4096, second, 512);
    }  // freed by its destructor
    const auto faults = pool.check_memory();
    pool.forget_stream(second);
    pool.forget_stream(first);
    const sp_stats_t stats = pool.stats();
    std::printf("%llu allocations, %llu live, %llu bytes reserved, %llu faults found by the check\n",
                static_cast<unsigned long long>(stats.allocations), static_cast<unsigned long long>(stats.live_blocks),
                static_cast<unsigned long long>(stats.reserved), static_cast<unsigned long long>(faults));
    pool.trim();
    pool.close();
    return stats.live_blocks == 0 && faults == 0 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
