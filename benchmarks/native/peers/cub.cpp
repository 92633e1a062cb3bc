// cub::CachingDeviceAllocator: bins of powers of two, up to any size, as replays need them.
#include "runtime.hpp"

#include <unistd.h>

#include <cub/util_allocator.cuh>
#include <cub/version.cuh>
#include <limits>

namespace {

class Cub : public bench::RuntimePeer {
 public:
  explicit Cub(const bench::Arguments& arguments)
      : RuntimePeer(arguments), allocator_(2, 8, 36, std::numeric_limits<std::size_t>::max(), true) {}
  void restart() {
    settle();
    bench::must(allocator_.FreeAllCached());
  }
  void* alloc(std::size_t size, Stream stream) {
    void* out = nullptr;
    bench::must(allocator_.DeviceAllocate(&out, size, stream));
    return out;
  }
  void free(void* pointer, std::size_t, Stream) { bench::must(allocator_.DeviceFree(pointer)); }
  std::string version() const {
    return std::to_string(CUB_MAJOR_VERSION) + "." + std::to_string(CUB_MINOR_VERSION) + "." +
           std::to_string(CUB_SUBMINOR_VERSION);
  }

 private:
  cub::CachingDeviceAllocator allocator_;
};

}  // namespace

int main(int argc, char** argv) {
  bench::Arguments arguments;
  if (!arguments.parse(argc, argv)) return 2;
  const int code = bench::run_worker([&] {
    Cub peer(arguments);
    return bench::serve(peer);
  });
  std::cout.flush();
  _exit(code);  // the driver may be gone before its destructor comes
}
