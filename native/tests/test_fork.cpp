// R22: a forked child has none of the parent's threads, and takes no lock that one of them may have held.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <string>
#include <thread>

#include "capi_watch.hpp"
#include "pool_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using testing::PoolScene;

STREAMPOOL_TEST("a forked child lets go of its pool where a thread of the parent was just declaring a capture") {
  PoolScene scene;
  driver::Captures& captures = scene.device->captures();
  const int who = 0;
  std::promise<void> inside, go_on;
  captures.listen(&who, [&] {  // with all that a declaration locks
    inside.set_value();
    go_on.get_future().wait();
  });
  std::thread declaring([&] { captures.begin(); });
  inside.get_future().wait();
  const pid_t child = fork();
  if (child == 0) {
    constexpr unsigned kTooLong = 20;  // seconds: a child that hangs is ended
    alarm(kTooLong);
    scene.core.reset();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  go_on.set_value();
  declaring.join();
  captures.leave(&who);
  CHECK(captures.end(0));
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
}

STREAMPOOL_TEST(
    "a forked child asks for no watched mode and notes no pool: a thread may have been asking as it forked") {
  constexpr std::size_t kLong = std::size_t{16} << 20;  // a copy takes almost all of a caller's time, under the lock
  constexpr int kForks = 5;
  PoolScene scene;
  capi::watch_pools(std::string(kLong, 'm'));
  std::atomic<bool> stop{false};
  std::atomic<int> asked{0};
  std::thread asking([&] {
    while (!stop) {
      asked += capi::watched_mode().size() == kLong;
    }
  });
  while (asked == 0) std::this_thread::yield();
  int went_well = 0;
  for (int i = 0; i < kForks && went_well == i; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      constexpr unsigned kTooLong = 20;  // seconds: a child that hangs is ended
      alarm(kTooLong);
      const bool silent = capi::watched_mode().empty();
      capi::note_pool(scene.core, {});
      capi::note_told(*scene.core, {});
      capi::note_end(*scene.core);
      _exit(silent ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    went_well += WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  stop = true;
  asking.join();
  capi::forget_pools();
  CHECK_EQ(went_well, kForks);
}

}  // namespace
