// R22: a forked child has none of the parent's threads, and takes no lock that one of them may have held.
#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <thread>

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

}  // namespace
