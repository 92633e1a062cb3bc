// PyTorch's memory from our pools: what stands behind the entry points of streampool/torch.h. One pool a device, made
// when it is first needed, so that no context is made on a device that the program does not use. Imports the pool.
#pragma once

#include <streampool/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../pool/core.hpp"

namespace streampool::attach::torch {

inline constexpr int kMaxDevices = 64;

// How pools are made from here on: on devices "FAMILY:N", with these options; `hooks` are what Python lends each.
struct Settings {
  std::string family = "cuda";
  std::string name = "torch";
  pool::OptionMap options;  // resolved
  pool::Hooks hooks;
};
void configure(Settings settings);

// The pool of one device, before PyTorch allocated there. False: it has one.
bool give_pool(int device, std::shared_ptr<pool::Core> core);

// The same back: the device has no pool from here on. Only where nobody calls the entry points meanwhile.
std::shared_ptr<pool::Core> take_back(int device);

struct Served {
  int device = 0;
  std::shared_ptr<pool::Core> core;
};
std::vector<Served> served();

// One of PyTorch's own streams, which live as long as the process and whose captures PyTorch declares.
void add_lasting_stream(int device, driver::StreamHandle stream);

// Frees that were refused, and declared uses that were not taken: nobody else could be told.
struct Problems {
  std::uint64_t count = 0;
  std::string first;
};
Problems problems();

}  // namespace streampool::attach::torch

extern "C" {
// As PyTorch calls them: c10::MempoolId_t is a pair of 64-bit numbers, the filter says whether a stream takes part.
// They declare the capture from before its begin until after its end; a graph's memory is the pool's own business
// (R23), so that there is nothing to do when PyTorch gives its graph pool up.
SP_API void sp_torch_begin_allocate_to_pool(int device, std::pair<std::uint64_t, std::uint64_t> id,
                                            std::function<bool(void*)> filter);
SP_API void sp_torch_end_allocate_to_pool(int device, std::pair<std::uint64_t, std::uint64_t> id);
SP_API void sp_torch_release_pool(int device, std::pair<std::uint64_t, std::uint64_t> id);
}
