// Runs the table of native tests without Python: for sanitizers and debuggers. `native_tests [WORD]` runs those whose
// name has WORD.
#include <cstdio>
#include <cstring>
#include <exception>

#include "test.hpp"

int main(int argc, char** argv) {
  int failed = 0, run = 0;
  for (const auto& test : streampool::testing::table()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    ++run;
    try {
      test.run();
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAILED %s\n  %s\n", test.name, error.what());
    }
  }
  std::printf("%d native tests, %d failed\n", run, failed);
  return failed == 0 && run > 0 ? 0 : 1;
}
