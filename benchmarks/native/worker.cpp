// The worker that ships in the wheel: streampool, the host's allocators, and the driver's own, which need nothing but
// what is there at run time. serve.hpp says how it is used; peers/ has the workers that must be compiled first.
#include "driver_peers.hpp"
#include "host_peers.hpp"
#include "serve.hpp"
#include "streampool_peer.hpp"

int main(int argc, char** argv) {
  bench::Arguments arguments;
  if (!arguments.parse(argc, argv)) {
    std::cerr << "usage: " << argv[0]
              << " glibc|mimalloc|streampool|streampool-raw|driver-pool|driver-malloc [--device D] [--options O]"
                 " [--streams N] [--library PATH]\n";
    return 2;
  }
  return bench::run_worker([&] {
    const auto with = [](auto&& peer) { return bench::serve(peer); };
    if (arguments.peer == "glibc") return with(bench::Glibc());
    if (arguments.peer == "mimalloc") return with(bench::Mimalloc(arguments.library));
    if (arguments.peer == "streampool") return with(bench::StreampoolPeer(arguments, true));
    if (arguments.peer == "streampool-raw") return with(bench::StreampoolPeer(arguments, false));
    if (arguments.peer == "driver-pool") return with(bench::DriverPool(arguments));
    if (arguments.peer == "driver-malloc") return with(bench::DriverMalloc(arguments));
    throw std::runtime_error("there is no peer '" + arguments.peer + "'");
  });
}
