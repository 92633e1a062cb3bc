// Native tests: functions in one table. pytest runs them through a small extension, main.cpp under the sanitizers.
#pragma once

#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace streampool::testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  const char* file;
  void (*run)();
};

inline std::vector<Test>& table() {
  static std::vector<Test> tests;
  return tests;
}

struct Register {
  Register(const char* name, const char* file, void (*run)()) { table().push_back({name, file, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::ostringstream text;
  text << file << ":" << line << ": " << what;
  throw Failure(text.str());
}

// Says why a test does nothing here.
inline void skip(const char* reason) { std::printf("SKIPPED: %s\n", reason); }

template <typename A, typename B>
void check_eq(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": ";
  if constexpr (requires { out << a << b; }) out << a << " is not " << b;
  fail(file, line, out.str());
}

}  // namespace streampool::testing

#define STREAMPOOL_TEST_CAT2(a, b) a##b
#define STREAMPOOL_TEST_CAT(a, b) STREAMPOOL_TEST_CAT2(a, b)
#define STREAMPOOL_TEST(sentence)                                                                   \
  static void STREAMPOOL_TEST_CAT(streampool_test_, __LINE__)();                                    \
  static const ::streampool::testing::Register STREAMPOOL_TEST_CAT(streampool_register_, __LINE__)( \
      sentence, __FILE__, STREAMPOOL_TEST_CAT(streampool_test_, __LINE__));                         \
  static void STREAMPOOL_TEST_CAT(streampool_test_, __LINE__)()
#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) ::streampool::testing::fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define CHECK_EQ(a, b) ::streampool::testing::check_eq((a), (b), #a " == " #b, __FILE__, __LINE__)
