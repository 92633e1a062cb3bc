// What the stub library lets a test see and set. A test gets it by dlsym(…, "stub_state"). Imports nothing of ours.
#pragma once

#include <atomic>
#include <cstdint>

namespace streampool::testing {

struct StubState {
  // What the library pretends. Read when a function is called.
  int init_result = 0;
  int version = 13000;
  int devices = 1;
  const char* missing = "";  // a function that cuGetProcAddress does not find
  const char* failing = "";  // a function that fails, with `failing_result`
  int failing_result = 0;
  bool invalidated = false;  // captures were lost, and not ended yet
  bool busy = false;         // launches wait, and stream queries say not ready, until it is false again
  bool ptds_asked = false;   // somebody resolved a function without the flag for the legacy stream

  // What happened to it.
  std::atomic<int> calls{0};            // calls that need a context
  std::atomic<int> strict_calls{0};     // those of them made in another capture mode than relaxed
  std::uintptr_t last_stream = 0;       // the handle of the last call that took a stream
  std::uint32_t last_handle_types = 0;  // of the last cuMemCreate
  int last_rdma = 0;
  int last_access_count = 0;            // how many devices the last cuMemSetAccess named
  std::uint64_t release_threshold = 0;  // of the last pool
  int retained = 0;                     // of the primary context
  std::uint64_t generation = 1;         // of the primary context; a reset raises it
  int user_objects = 0;                 // made and not destroyed
  std::int64_t live = 0;                // pieces of memory, handles, reservations, streams, events not given back
};

}  // namespace streampool::testing
