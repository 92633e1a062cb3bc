// RMM: pool and arena over cudaMalloc, and the pool under RMM's own tracking.
#include "runtime.hpp"

#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <rmm/mr/tracking_resource_adaptor.hpp>

#include <memory>
#include <utility>

namespace {

constexpr std::size_t kAlignment = 256;

template <typename Make>
class Rmm : public bench::RuntimePeer {
 public:
  using Resource = decltype(std::declval<Make>()());
  Rmm(const bench::Arguments& arguments, Make make) : RuntimePeer(arguments), make_(std::move(make)) { open(); }
  void restart() {
    settle();
    resource_.reset();
    open();
  }
  void* alloc(std::size_t size, Stream stream) {
    return resource_->allocate(cuda::stream_ref{stream}, size, kAlignment);
  }
  void free(void* pointer, std::size_t size, Stream stream) {
    resource_->deallocate(cuda::stream_ref{stream}, pointer, size, kAlignment);
  }
  std::string version() const { return ""; }  // the caller knows the package's

 private:
  void open() { resource_.reset(new Resource(make_())); }
  Make make_;
  std::unique_ptr<Resource> resource_;
};

// The first piece, in bytes: "initial=268435456".
std::size_t initial(const bench::Arguments& arguments) {
  const std::size_t equals = arguments.options.find('=');
  return equals == std::string::npos ? std::size_t{1} << 28 : std::stoull(arguments.options.substr(equals + 1));
}

template <typename Make>
int serve(const bench::Arguments& arguments, const Make& make) {
  Rmm<Make> peer(arguments, make);
  return bench::serve(peer);
}

}  // namespace

int main(int argc, char** argv) {
  bench::Arguments arguments;
  if (!arguments.parse(argc, argv)) return 2;
  return bench::run_worker([&] {
    const std::size_t first = initial(arguments);
    const auto pool = [&] { return rmm::mr::pool_memory_resource{rmm::mr::cuda_memory_resource{}, first}; };
    if (arguments.peer == "pool") return serve(arguments, pool);
    if (arguments.peer == "arena")
      return serve(arguments, [&] { return rmm::mr::arena_memory_resource{rmm::mr::cuda_memory_resource{}, first}; });
    if (arguments.peer == "tracking")
      return serve(arguments, [&] { return rmm::mr::tracking_resource_adaptor{pool(), false}; });
    if (arguments.peer == "stacks")
      return serve(arguments, [&] { return rmm::mr::tracking_resource_adaptor{pool(), true}; });
    throw std::runtime_error("there is no peer '" + arguments.peer + "'");
  });
}
