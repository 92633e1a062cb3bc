// The machine's memory: allocations, address reservations, handles and their mappings, all backed by host memory that
// is committed only when touched. Knows nothing of streams; who waits for what is decided above. Imports base/,
// driver.hpp.
//
// A device's physical memory is one sparse in-memory file. A handle is a piece of it whose place is never given out
// again, so a place names one piece of memory for ever: the race check uses it as the identity of aliased bytes.
// Invariant: used(device) = sizes of its allocations and of its handles that are not yet destroyed, in whole pages.
// Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../driver.hpp"
#include "machine.hpp"

namespace streampool::driver::sim {

inline constexpr Bytes kPage = 2 * kMiB;              // granularity of device memory
inline constexpr Bytes kAddressBudget = 1024 * kGiB;  // all reservations of the process

// A run of bytes by its place in the machine, where aliases of the same memory meet.
struct Place {
  std::uint64_t key = 0;
  Bytes size = 0;
  Address address = 0;  // where the access named it
};

class Memory {
 public:
  Memory(int devices, Bytes device_memory, Bytes host_memory);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Code alloc(int device, Kind kind, Bytes size, Address* out);
  bool owns(Kind kind, Address address) const;  // a live allocation of this kind starts here
  // `in_use`: work that is running touches it; then it stays readable for ever, and the caller reports the fault.
  Code free(Kind kind, Address address, bool* in_use);
  Bytes used(int device) const;
  void info(int device, Bytes* free_bytes, Bytes* total) const;
  void set_occupied(int device, Bytes bytes);

  Code reserve(Bytes size, Bytes alignment, Address* out);
  Code unreserve(Address address, Bytes size);
  Code create(int device, Bytes size, MemoryHandle* out);
  Code release(MemoryHandle handle);
  Code map(Address address, Bytes size, MemoryHandle handle);
  Code unmap(Address address, Bytes size, bool* in_use);
  Code set_access(Address address, Bytes size, std::vector<int> devices);
  std::vector<int> accessors(Address address) const;

  // The driver's own pools (pools.cpp). `stream` is the id of the stream in whose order something happens; `pool_ready`
  // and `pool_gone` say that the stream has come there. In between the memory may be touched.
  PoolHandle pool_create(int device);
  Code pool_destroy(PoolHandle pool);
  Code pool_take(PoolHandle pool, std::uint64_t stream, Bytes size, Address* out, Bytes* mapped);
  void pool_ready(Address address);
  Code pool_give(Address address, std::uint64_t stream, Bytes* mapped, std::uint64_t* number);
  void pool_gone(Address address, std::uint64_t number);
  void pool_observe(std::uint64_t stream);
  Code pool_trim(PoolHandle pool, Bytes keep);

  // Work is about to touch these bytes: null when it may (end with `leave`), else the first access that faults.
  const Access* enter(const std::vector<Access>& accesses, std::uint64_t* ticket);
  void leave(std::uint64_t ticket);

  bool known(Address address) const;  // inside an allocation or a reservation
  void places(const Access& access, std::vector<Place>* out) const;

  // The generation ended: its reservations no longer count for the process.
  void retire();

 private:
  struct Allocation {
    Bytes size = 0;  // mapped
    int device = 0;
    Kind kind = Kind::device;
  };
  struct Mapping {
    Bytes size = 0;
    MemoryHandle handle = 0;
    std::vector<int> devices{};  // that may reach it
  };
  struct Reservation {
    Bytes size = 0;
    std::map<Address, Mapping> mappings;
  };
  struct Handle {
    int device = 0;
    Bytes size = 0;
    std::uint64_t offset = 0;
    std::uint32_t mapped = 0;
    bool released = false;
  };
  // A piece of a driver's pool: one mapping of the host. Handed out, or kept for the next one who asks for that much.
  // Kept pieces are also what a larger request is made of, as the driver does by mapping memory anew.
  struct PoolPiece {
    Bytes size = 0;
    bool used = true;
    std::uint64_t stream = 0;  // where it was freed
    std::uint64_t number = 0;  // of that free; 0: the stream has come there, anybody may have the piece
    bool noted = false;        // and the host has taken note of it: the memory may go
  };
  struct DriverPool {
    int device = 0;
    bool destroyed = false;
    std::map<Address, PoolPiece> pieces;
  };
  struct Physical {
    int file = -1;
    Bytes used = 0;
    Bytes occupied = 0;
    std::uint64_t next_offset = 0;
  };

  Code take(int device, Bytes size);
  Physical& physical(int device) { return physical_[static_cast<std::size_t>(device)]; }
  const Physical& physical(int device) const { return physical_[static_cast<std::size_t>(device)]; }
  Reservation* reservation_of(Address address, Bytes size, Address* begin);
  bool accessible(Address begin, Bytes size) const;
  bool touched_by_running(Address begin, Bytes size) const;
  void drop_piece(DriverPool& pool, std::map<Address, PoolPiece>::iterator piece);
  DriverPool* pool_of(Address address, std::map<Address, PoolPiece>::iterator* piece);
  void destroy_if_unused(std::unordered_map<MemoryHandle, Handle>::iterator found);

  mutable std::mutex mutex_;
  const Bytes device_memory_;
  const Bytes host_memory_;
  Bytes host_used_ = 0;
  bool retired_ = false;
  std::vector<Physical> physical_;
  std::map<Address, Allocation> allocations_;
  std::map<Address, Reservation> reservations_;
  std::unordered_map<MemoryHandle, Handle> handles_;
  MemoryHandle next_handle_ = 1;
  std::map<PoolHandle, DriverPool> pools_;
  PoolHandle next_pool_ = 1;
  std::uint64_t next_free_ = 1;
  std::map<Address, Bytes> ready_;  // of the pools: what may be touched now
  std::map<std::uint64_t, std::vector<Access>> running_;
  std::uint64_t next_ticket_ = 1;
  std::vector<std::pair<Address, Bytes>> kept_;  // freed under running work
};

}  // namespace streampool::driver::sim
