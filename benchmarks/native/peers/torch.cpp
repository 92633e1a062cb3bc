// PyTorch's caching allocator, which reads PYTORCH_CUDA_ALLOC_CONF (expandable_segments:True) when it starts.
#include "runtime.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <unistd.h>

namespace {

class Torch : public bench::RuntimePeer {
 public:
  explicit Torch(const bench::Arguments& arguments) : RuntimePeer(arguments) {
    c10::cuda::CUDACachingAllocator::init(ordinal_ + 1);
  }
  void restart() {
    settle();
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
  void* alloc(std::size_t size, Stream stream) {
    return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(size, stream);
  }
  void free(void* pointer, std::size_t, Stream) { c10::cuda::CUDACachingAllocator::raw_delete(pointer); }
  std::string version() const { return ""; }  // the caller knows the package's
};

}  // namespace

int main(int argc, char** argv) {
  bench::Arguments arguments;
  if (!arguments.parse(argc, argv)) return 2;
  const int code = bench::run_worker([&] {
    Torch peer(arguments);
    return bench::serve(peer);
  });
  std::cout.flush();
  _exit(code);  // its destructors call a driver that may be gone
}
