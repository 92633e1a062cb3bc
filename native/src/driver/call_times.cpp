#include "call_times.hpp"

#include <map>
#include <mutex>
#include <string>

namespace streampool::driver {

std::span<const char* const> memory_work_words() {
  static constexpr const char* kWords[] = {
#define STREAMPOOL_ROW(name, text) #name,
      STREAMPOOL_MEMORY_WORK(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
  };
  return kWords;
}

CallTimes& call_times_of(std::string_view device) {
  // Leaked on purpose: pools of static lifetime may outlive our statics (R22).
  static std::mutex* mutex = new std::mutex;
  static auto* all = new std::map<std::string, CallTimes, std::less<>>;
  std::lock_guard lock(*mutex);
  auto found = all->find(device);
  if (found == all->end()) found = all->try_emplace(std::string(device)).first;
  return found->second;
}

}  // namespace streampool::driver
