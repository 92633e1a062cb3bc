// The words of fault.hpp's tables.
#include "fault.hpp"

namespace streampool::debug {

std::string_view fault_word(FaultKind kind) {
  switch (kind) {
#define STREAMPOOL_ROW(name, text) \
  case FaultKind::name: return #name;
    STREAMPOOL_FAULT_KINDS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
  }
  return "?";
}

std::string_view fault_meaning(FaultKind kind) {
  switch (kind) {
#define STREAMPOOL_ROW(name, text) \
  case FaultKind::name: return text;
    STREAMPOOL_FAULT_KINDS(STREAMPOOL_ROW)
#undef STREAMPOOL_ROW
  }
  return "?";
}

std::string_view page_guard_word(PageGuard guard) {
  switch (guard) {
    case PageGuard::none: return "none";
    case PageGuard::right: return "right";
    case PageGuard::left: return "left";
  }
  return "?";
}

std::string_view block_state_word(BlockState state) {
  switch (state) {
    case BlockState::live: return "live";
    case BlockState::released: return "released";
    case BlockState::quarantined: return "quarantined";
    case BlockState::freed: return "freed";
  }
  return "?";
}

}  // namespace streampool::debug
