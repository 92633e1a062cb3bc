// The driver's own pools in the machine's memory. See memory.hpp. Imports the host's memory calls (mmap).
#include <sys/mman.h>

#include <algorithm>
#include <vector>

#include "host_mappings.hpp"
#include "host_pointer.hpp"
#include "memory.hpp"

namespace streampool::driver::sim {

PoolHandle Memory::pool_create(int device) {
  const std::lock_guard lock(mutex_);
  const PoolHandle handle = next_pool_++;
  pools_[handle].device = device;
  return handle;
}

void Memory::drop_piece(DriverPool& pool, std::map<Address, PoolPiece>::iterator piece) {
  const auto [address, one] = *piece;
  pool.pieces.erase(piece);
  physical(pool.device).used -= one.size;
  if (touched_by_running(address, one.size)) {
    kept_.emplace_back(address, one.size);  // the work that runs there is at fault; it is told by the race check
    return;
  }
  munmap(host_pointer(address), one.size);
  add_mappings(-1);
}

Code Memory::pool_destroy(PoolHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = pools_.find(handle);
  if (found == pools_.end() || found->second.destroyed) return Code::invalid;
  DriverPool& pool = found->second;
  pool.destroyed = true;
  for (auto piece = pool.pieces.begin(); piece != pool.pieces.end();) {
    const auto one = piece++;
    if (!one->second.used && one->second.number == 0) drop_piece(pool, one);
  }
  if (pool.pieces.empty()) pools_.erase(found);
  return Code::ok;
}

Code Memory::pool_take(PoolHandle handle, std::uint64_t stream, Bytes size, Address* out, Bytes* mapped) {
  if (size == 0) return Code::invalid;
  if (!round_up_checked(size, kPage, mapped)) return Code::out_of_memory;
  const std::lock_guard lock(mutex_);
  const auto found = pools_.find(handle);
  if (found == pools_.end() || found->second.destroyed) return Code::invalid;
  DriverPool& pool = found->second;
  for (auto& [address, piece] : pool.pieces) {
    if (piece.used || piece.size != *mapped || (piece.number != 0 && piece.stream != stream)) continue;
    piece.used = true;
    piece.number = 0;
    piece.noted = false;
    *out = address;
    return Code::ok;
  }
  // What is kept and done with makes room first, the largest pieces before the others.
  std::vector<Address> kept;
  for (const auto& [address, piece] : pool.pieces)
    if (!piece.used && piece.noted) kept.push_back(address);
  std::sort(kept.begin(), kept.end(),
            [&](Address a, Address b) { return pool.pieces.at(a).size > pool.pieces.at(b).size; });
  Bytes room = 0;
  for (const Address address : kept) {
    if (room >= *mapped) break;
    const auto piece = pool.pieces.find(address);
    room += piece->second.size;
    drop_piece(pool, piece);
  }
  if (const Code code = take(pool.device, *mapped); code != Code::ok) return code;
  void* place = MAP_FAILED;
  if (add_mappings(1)) {
    place = mmap(nullptr, *mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) add_mappings(-1);
  }
  if (place == MAP_FAILED) {
    physical(pool.device).used -= *mapped;
    return Code::out_of_memory;
  }
  *out = reinterpret_cast<Address>(place);
  pool.pieces.emplace(*out, PoolPiece{*mapped, true, 0, 0, false});
  return Code::ok;
}

Memory::DriverPool* Memory::pool_of(Address address, std::map<Address, PoolPiece>::iterator* piece) {
  for (auto& [handle, pool] : pools_)
    if (*piece = pool.pieces.find(address); *piece != pool.pieces.end()) return &pool;
  return nullptr;
}

void Memory::pool_ready(Address address) {
  const std::lock_guard lock(mutex_);
  std::map<Address, PoolPiece>::iterator piece;
  if (pool_of(address, &piece) != nullptr) ready_[address] = piece->second.size;
}

Code Memory::pool_give(Address address, std::uint64_t stream, Bytes* mapped, std::uint64_t* number) {
  const std::lock_guard lock(mutex_);
  std::map<Address, PoolPiece>::iterator piece;
  if (pool_of(address, &piece) == nullptr || !piece->second.used) return Code::invalid;
  piece->second.used = false;
  piece->second.stream = stream;
  *number = piece->second.number = next_free_++;
  *mapped = piece->second.size;
  return Code::ok;
}

void Memory::pool_gone(Address address, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  ready_.erase(address);
  std::map<Address, PoolPiece>::iterator piece;
  DriverPool* pool = pool_of(address, &piece);
  // Handed out again already in the same stream's order: then the piece is no longer this free's.
  if (pool == nullptr || piece->second.number != number) return;
  piece->second.number = 0;
  if (!pool->destroyed) return;
  drop_piece(*pool, piece);
  if (pool->pieces.empty()) std::erase_if(pools_, [pool](const auto& entry) { return &entry.second == pool; });
}

void Memory::pool_observe(std::uint64_t stream) {
  const std::lock_guard lock(mutex_);
  for (auto& [handle, pool] : pools_)
    for (auto& [address, piece] : pool.pieces)
      if (!piece.used && piece.number == 0 && piece.stream == stream) piece.noted = true;
}

Code Memory::pool_trim(PoolHandle handle, Bytes keep) {
  const std::lock_guard lock(mutex_);
  const auto found = pools_.find(handle);
  if (found == pools_.end() || found->second.destroyed) return Code::invalid;
  DriverPool& pool = found->second;
  Bytes held = 0;
  for (const auto& [address, piece] : pool.pieces) held += piece.size;
  for (auto piece = pool.pieces.begin(); piece != pool.pieces.end();) {
    const auto one = piece++;
    const Bytes size = one->second.size;
    if (one->second.used || !one->second.noted || held - size < keep) continue;
    held -= size;
    drop_piece(pool, one);
  }
  return Code::ok;
}

}  // namespace streampool::driver::sim
