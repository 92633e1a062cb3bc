// What an alloc + free pair costs the calling thread, against glibc's malloc + free in the same process.
//   pairs [--device sim:0] [--options mode=production] [--repetitions 9] [--pairs 200000] [--threads N] [--json]
// glibc is measured first, while the process has one thread and a fresh heap, which is its best case. Every figure is
// the median (and the minimum) of the repetitions after one that is not counted; with threads it is that of the slowest
// one. Prints a table, or with --json one JSON object. Measures through the public headers, as a C++ program would; the
// rows "core" go around the C ABI and tell what that adds.
#include <gnu/libc-version.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <streampool/pool.hpp>
#include <string>
#include <thread>
#include <vector>

#include "json.hpp"
#include "patterns.hpp"
#include "pool/core.hpp"
#include "threads.hpp"

namespace {

using bench::quoted;
using streampool::pool::AllocRequest;
using streampool::pool::BlockRef;
using streampool::pool::Core;
using streampool::pool::FreeRequest;

struct Arguments {
  std::string device = "sim:0", options = "mode=production";
  int repetitions = 9, pairs = 200000;
  int threads = 0;  // most of them; 0: as many as the machine runs at once
  bool json = false;
};

struct Figure {
  std::string what;
  int threads = 1;
  double median = 0, minimum = 0;  // ns a pair
  double against = 0;              // median / glibc's median for the same pattern; 0: nothing to compare with
};

// Runs `once(repetition)` so often, the first time for nothing.
template <typename Once>
Figure repeat(const Arguments& arguments, std::string what, int threads, const Once& once) {
  std::vector<double> times;
  once(0);
  for (int i = 1; i <= arguments.repetitions; ++i) times.push_back(once(i));
  std::sort(times.begin(), times.end());
  return {std::move(what), threads, times[times.size() / 2], times.front(), 0};
}

// The slowest of `threads` threads that start together; `body(thread)` gives what its loop took.
template <typename Body>
double slowest_of(int threads, const Body& body) {
  return bench::slowest(bench::together(threads, [](int) {}, body));
}

struct Bench {
  const Arguments& arguments;
  std::vector<Figure> figures;
  Figure malloc_4k, malloc_1m, malloc_window;

  explicit Bench(const Arguments& given) : arguments(given) {}

  void add(Figure figure, const Figure& against) {
    figure.against = figure.median / against.median;
    figures.push_back(std::move(figure));
  }
  template <typename Alloc, typename Free>
  void three_patterns(const std::string& who, const Alloc& alloc, const Free& free) {
    const int pairs = arguments.pairs;
    add(repeat(arguments, "4 KiB pair, " + who, 1, [&](int) { return bench::pair(4096, pairs, alloc, free).mean(); }),
        malloc_4k);
    add(repeat(arguments, "1 MiB pair, " + who, 1,
               [&](int) { return bench::pair(1 << 20, pairs, alloc, free).mean(); }),
        malloc_1m);
    add(repeat(arguments, "256 live, random sizes, " + who, 1,
               [&](int r) { return bench::window(static_cast<unsigned>(r) + 7, pairs, alloc, free).mean(); }),
        malloc_window);
  }
  void glibc() {
    const int pairs = arguments.pairs;
    const auto alloc = [](std::size_t size) { return std::malloc(size); };
    const auto free = [](void* pointer, std::size_t) { std::free(pointer); };
    malloc_4k = repeat(arguments, "4 KiB pair, glibc malloc", 1,
                       [&](int) { return bench::pair(4096, pairs, alloc, free).mean(); });
    malloc_1m = repeat(arguments, "1 MiB pair, glibc malloc", 1,
                       [&](int) { return bench::pair(1 << 20, pairs, alloc, free).mean(); });
    malloc_window = repeat(arguments, "256 live, random sizes, glibc malloc", 1, [&](int r) {
      return bench::window(static_cast<unsigned>(r) + 7, pairs, alloc, free).mean();
    });
    for (const Figure& figure : {malloc_4k, malloc_1m, malloc_window}) add(figure, figure);
  }

  // Through the C ABI.
  void abi(const sp::Pool& pool, const sp::Stream& stream, const std::string& who) {
    three_patterns(
        who,
        [pool = pool.get(), stream = stream.get()](std::size_t size) {
          void* out = nullptr;
          sp::check(sp_alloc(pool, size, 0, stream, &out));
          return out;
        },
        [pool = pool.get(), stream = stream.get()](void* pointer, std::size_t) {
          sp::check(sp_free(pool, pointer, stream));
        });
  }
  // Around it.
  void core(Core& pool, const sp::Stream& stream) {
    AllocRequest request;
    request.stream = reinterpret_cast<std::uintptr_t>(stream.get());
    request.raw = true;
    FreeRequest by;
    by.stream = request.stream;
    const auto check = [](streampool::pool::Errc errc, const streampool::pool::Failure& failure) {
      if (errc != streampool::pool::Errc::ok) throw std::runtime_error(failure.text);
    };
    three_patterns(
        "core",
        [&](std::size_t size) {
          streampool::pool::Failure failure;
          BlockRef block;
          request.size = size;
          check(pool.allocate(request, &block, &failure), failure);
          return reinterpret_cast<void*>(block.address);
        },
        [&](void* pointer, std::size_t) {
          streampool::pool::Failure failure;
          check(pool.free(reinterpret_cast<streampool::Address>(pointer), by, &failure), failure);
        });
  }
  // The 4 KiB pair of many threads: on streams of their own, or all on one.
  void many(const sp::Pool& pool, const std::vector<sp::Stream>& streams, int threads, bool shared) {
    const auto body = [&](int thread) {
      const sp::Stream& stream = streams[shared ? 0 : static_cast<std::size_t>(thread)];
      return bench::pair(
          4096, arguments.pairs / 2,
          [&](std::size_t size) {
            void* out = nullptr;
            sp::check(sp_alloc(pool.get(), size, 0, stream, &out));
            return out;
          },
          [&](void* pointer, std::size_t) { sp::check(sp_free(pool.get(), pointer, stream)); }, bench::Company::others);
    };
    add(repeat(arguments, shared ? "4 KiB pair, all on one stream" : "4 KiB pair, each on its own stream", threads,
               [&](int) { return slowest_of(threads, body); }),
        malloc_4k);
  }
  void many_malloc(int threads) {
    const auto body = [&](int) {
      return bench::pair(
          4096, arguments.pairs / 2, [](std::size_t size) { return std::malloc(size); },
          [](void* pointer, std::size_t) { std::free(pointer); }, bench::Company::others);
    };
    add(repeat(arguments, "4 KiB pair, glibc malloc", threads, [&](int) { return slowest_of(threads, body); }),
        malloc_4k);
  }
};

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  utsname names{};
  uname(&names);
  return names.machine;
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

void print_json(const Arguments& arguments, const std::vector<Figure>& figures) {
  utsname names{};
  uname(&names);
  std::printf("{\"benchmark\": \"pairs\", \"unit\": \"ns a pair\", \"device\": %s, \"options\": %s,\n",
              quoted(arguments.device).c_str(), quoted(arguments.options).c_str());
  std::printf(" \"machine\": {\"processor\": %s, \"cores\": %u, \"system\": %s}, \"compiler\": %s,\n",
              quoted(processor()).c_str(), std::thread::hardware_concurrency(),
              quoted(std::string(names.sysname) + " " + names.release).c_str(), quoted(compiler()).c_str());
  std::printf(" \"versions\": {\"streampool\": \"%s\", \"glibc\": \"%s\"}, \"repetitions\": %d, \"pairs\": %d,\n",
              sp_version(), gnu_get_libc_version(), arguments.repetitions, arguments.pairs);
  std::printf(" \"figures\": [");
  for (const Figure& f : figures)
    std::printf("%s\n  {\"what\": %s, \"threads\": %d, \"median\": %.2f, \"min\": %.2f, \"against_malloc\": %.3f}",
                &f == figures.data() ? "" : ",", quoted(f.what).c_str(), f.threads, f.median, f.minimum, f.against);
  std::printf("\n ]}\n");
}

void print_table(const Arguments& arguments, const std::vector<Figure>& figures) {
  std::printf("%s, %s, %s; glibc %s, %u cores; median of %d repetitions of %d pairs\n", arguments.device.c_str(),
              arguments.options.c_str(), processor().c_str(), gnu_get_libc_version(),
              std::thread::hardware_concurrency(), arguments.repetitions, arguments.pairs);
  std::printf("%-44s %8s %10s %10s %10s\n", "", "threads", "ns a pair", "min", "x malloc");
  for (const Figure& f : figures)
    std::printf("%-44s %8d %10.1f %10.1f %10.2f\n", f.what.c_str(), f.threads, f.median, f.minimum, f.against);
}

bool parse(int argc, char** argv, Arguments* out) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--json") {
      out->json = true;
      continue;
    }
    if (i + 1 >= argc) return false;
    const char* const value = argv[++i];
    if (name == "--device")
      out->device = value;
    else if (name == "--options")
      out->options = value;
    else if (name == "--repetitions")
      out->repetitions = std::atoi(value);
    else if (name == "--pairs")
      out->pairs = std::atoi(value);
    else if (name == "--threads")
      out->threads = std::atoi(value);
    else
      return false;
  }
  return out->repetitions > 0 && out->pairs > 1 && out->threads >= 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, &arguments)) {
    std::fprintf(stderr,
                 "usage: %s [--device sim:0] [--options mode=production] [--repetitions 9] [--pairs 200000] [--threads "
                 "N] [--json]\n",
                 argv[0]);
    return 2;
  }
  Bench bench(arguments);
  bench.glibc();  // before anything else has been done
  try {
    const sp::Device device(arguments.device.c_str());
    const sp::Pool pool(device, "device", arguments.options.c_str());
    std::vector<sp::Stream> streams;
    const int most = arguments.threads != 0 ? arguments.threads
                                            : static_cast<int>(std::max(2u, std::thread::hardware_concurrency()));
    for (int i = 0; i < most; ++i) {
      streams.push_back(device.create_stream());
      pool.register_stream(streams.back());
    }
    bench.abi(pool, streams[0], "lasting stream");
    {
      const auto pools = Core::all();
      bench.core(*pools.front(), streams[0]);
    }
    const sp::Stream raw = device.create_stream();
    bench.abi(pool, raw, "raw handle");
    for (int threads = 2; threads <= most; threads *= 2) bench.many_malloc(threads);
    for (int threads = 1; threads <= most; threads *= 2) bench.many(pool, streams, threads, false);
    for (int threads = 2; threads <= most; threads *= 2) bench.many(pool, streams, threads, true);
    for (const sp::Stream& stream : streams) pool.forget_stream(stream);
    arguments.device = device.name();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  if (arguments.json)
    print_json(arguments, bench.figures);
  else
    print_table(arguments, bench.figures);
  return 0;
}
