// See memory.hpp. Imports the host's memory calls (mmap, memfd).
#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iterator>

#include "host_mappings.hpp"
#include "host_pointer.hpp"

namespace streampool::driver::sim {
namespace {

constexpr Bytes kHostPage = 4096;
constexpr Bytes kFileSize = Bytes{1} << 46;             // sparse; bounds only how much may be created over time
constexpr std::uint64_t kPhysicalKey = Bytes{1} << 62;  // above every address
constexpr std::int64_t kMappingsOfOthers = 12'000;  // left to the rest of the process: libraries, threads, host malloc

// Shared by all generations in the process.
std::atomic<Bytes> reserved_addresses{0};
std::atomic<std::int64_t> host_mappings{0};

std::int64_t mapping_limit() {
  static const std::int64_t limit = [] {
    std::int64_t value = 65'530;
    if (std::FILE* file = std::fopen("/proc/sys/vm/max_map_count", "r")) {
      long read = 0;
      if (std::fscanf(file, "%ld", &read) == 1 && read > 0) value = read;
      std::fclose(file);
    }
    return std::max<std::int64_t>(value - kMappingsOfOthers, value / 4);
  }();
  return limit;
}

constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

bool overlap(Address a, Bytes a_size, Address b, Bytes b_size) { return a < b + b_size && b < a + a_size; }

bool in_range(Address begin, Bytes size) { return size <= ~begin; }

// How many host mappings more there are when [begin, end) of the gap [gap_begin, gap_end) becomes a mapping.
std::int64_t mappings_for(Address begin, Address end, Address gap_begin, Address gap_end) {
  return 1 + (begin > gap_begin ? 1 : 0) + (end < gap_end ? 1 : 0) - 1;
}

// The unmapped run around [begin, end), which itself is taken as unmapped.
template <typename Mappings>
std::pair<Address, Address> gap_around(const Mappings& mappings, Address begin, Address end, Address low,
                                       Address high) {
  auto above = mappings.lower_bound(end);
  if (above != mappings.end()) high = above->first;
  auto below = mappings.lower_bound(begin);
  if (below != mappings.begin()) {
    --below;
    low = std::max(low, below->first + below->second.size);
  }
  return {low, high};
}

}  // namespace

bool add_mappings(std::int64_t n) {
  if (host_mappings.fetch_add(n) + n <= mapping_limit() || n <= 0) return true;
  host_mappings.fetch_sub(n);
  return false;
}

Memory::Memory(int devices, Bytes device_memory, Bytes host_memory)
    : device_memory_(device_memory), host_memory_(host_memory) {
  physical_.resize(static_cast<std::size_t>(devices));
}

Memory::~Memory() {
  for (const auto& [address, allocation] : allocations_) {
    munmap(host_pointer(address), allocation.size);
    host_mappings.fetch_sub(1);
  }
  for (const auto& [address, bytes] : kept_) munmap(host_pointer(address), bytes);
  for (const auto& [handle, pool] : pools_)
    for (const auto& [address, piece] : pool.pieces) {
      munmap(host_pointer(address), piece.size);
      host_mappings.fetch_sub(1);
    }
  for (const auto& [address, reservation] : reservations_) {
    munmap(host_pointer(address), reservation.size);
    std::int64_t count = 1;
    Address end = address;
    for (const auto& [begin, mapping] : reservation.mappings) {
      count += begin > end ? 2 : 1;
      end = begin + mapping.size;
    }
    if (!reservation.mappings.empty() && end == address + reservation.size) --count;
    host_mappings.fetch_sub(count);
    if (!retired_) reserved_addresses.fetch_sub(reservation.size);
  }
  for (const Physical& one : physical_)
    if (one.file >= 0) close(one.file);
}

void Memory::retire() {
  const std::lock_guard lock(mutex_);
  if (retired_) return;
  retired_ = true;
  for (const auto& entry : reservations_) reserved_addresses.fetch_sub(entry.second.size);
}

Code Memory::take(int device, Bytes size) {
  Physical& one = physical(device);
  const Bytes held = one.used + one.occupied;
  if (held > device_memory_ || size > device_memory_ - held) return Code::out_of_memory;
  one.used += size;
  return Code::ok;
}

Code Memory::alloc(int device, Kind kind, Bytes size, Address* out) {
  Bytes mapped = 0;
  if (size == 0) return Code::invalid;
  if (!round_up_checked(size, kind == Kind::device ? kPage : kHostPage, &mapped)) return Code::out_of_memory;
  const std::lock_guard lock(mutex_);
  if (kind == Kind::device) {
    if (const Code code = take(device, mapped); code != Code::ok) return code;
  } else {
    if (mapped > host_memory_ - host_used_) return Code::out_of_memory;
    host_used_ += mapped;
  }
  void* place = MAP_FAILED;
  if (add_mappings(1)) {
    place = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, kReserveFlags, -1, 0);
    if (place == MAP_FAILED) host_mappings.fetch_sub(1);
  }
  if (place == MAP_FAILED) {
    if (kind == Kind::device) {
      physical(device).used -= mapped;
    } else {
      host_used_ -= mapped;
    }
    return Code::out_of_memory;
  }
  *out = reinterpret_cast<Address>(place);
  allocations_.emplace(*out, Allocation{mapped, device, kind});
  return Code::ok;
}

bool Memory::owns(Kind kind, Address address) const {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(address);
  return found != allocations_.end() && found->second.kind == kind;
}

Code Memory::free(Kind kind, Address address, bool* in_use) {
  const std::lock_guard lock(mutex_);
  const auto found = allocations_.find(address);
  if (found == allocations_.end() || found->second.kind != kind) return Code::invalid;
  const Allocation allocation = found->second;
  *in_use = touched_by_running(address, allocation.size);
  if (*in_use) {
    kept_.emplace_back(address, allocation.size);
  } else {
    munmap(host_pointer(address), allocation.size);
    host_mappings.fetch_sub(1);
  }
  allocations_.erase(found);
  if (kind == Kind::device) {
    physical(allocation.device).used -= allocation.size;
  } else {
    host_used_ -= allocation.size;
  }
  return Code::ok;
}

Bytes Memory::used(int device) const {
  const std::lock_guard lock(mutex_);
  return physical(device).used;
}

void Memory::info(int device, Bytes* free_bytes, Bytes* total) const {
  const std::lock_guard lock(mutex_);
  const Bytes held = physical(device).used + physical(device).occupied;
  *free_bytes = held < device_memory_ ? device_memory_ - held : 0;
  *total = device_memory_;
}

void Memory::set_occupied(int device, Bytes bytes) {
  const std::lock_guard lock(mutex_);
  physical(device).occupied = bytes;
}

Code Memory::reserve(Bytes size, Bytes alignment, Address* out) {
  if (alignment == 0) alignment = kPage;
  if (size == 0 || size % kPage != 0 || !is_power_of_two(alignment)) return Code::invalid;
  alignment = std::max(alignment, kPage);
  if (alignment > kAddressBudget || size > kAddressBudget) return Code::out_of_memory;
  const std::lock_guard lock(mutex_);
  if (retired_) return Code::lost;
  if (reserved_addresses.fetch_add(size) + size > kAddressBudget) {
    reserved_addresses.fetch_sub(size);
    return Code::out_of_memory;
  }
  const Bytes asked = size + alignment;  // cut to the alignment afterwards
  void* place = MAP_FAILED;
  if (add_mappings(1)) {
    place = mmap(nullptr, asked, PROT_NONE, kReserveFlags, -1, 0);
    if (place == MAP_FAILED) host_mappings.fetch_sub(1);
  }
  if (place == MAP_FAILED) {
    reserved_addresses.fetch_sub(size);
    return Code::out_of_memory;
  }
  const Address raw = reinterpret_cast<Address>(place);
  const Address begin = round_up(raw, alignment);
  if (begin > raw) munmap(place, begin - raw);
  if (raw + asked > begin + size) munmap(host_pointer(begin + size), raw + asked - begin - size);
  reservations_[begin].size = size;
  *out = begin;
  return Code::ok;
}

Code Memory::unreserve(Address address, Bytes size) {
  const std::lock_guard lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second.size != size || !found->second.mappings.empty()) {
    return Code::invalid;
  }
  munmap(host_pointer(address), size);
  host_mappings.fetch_sub(1);
  if (!retired_) reserved_addresses.fetch_sub(size);
  reservations_.erase(found);
  return Code::ok;
}

Code Memory::create(int device, Bytes size, MemoryHandle* out) {
  if (size == 0 || size % kPage != 0) return Code::invalid;
  const std::lock_guard lock(mutex_);
  Physical& one = physical(device);
  if (one.file < 0) {
    one.file = memfd_create("streampool-sim", MFD_CLOEXEC);
    if (one.file < 0) return Code::failed;
    if (ftruncate(one.file, static_cast<off_t>(kFileSize)) != 0) {
      close(one.file);
      one.file = -1;
      return Code::failed;
    }
  }
  if (size > kFileSize - one.next_offset) return Code::out_of_memory;
  if (const Code code = take(device, size); code != Code::ok) return code;
  *out = next_handle_++;
  handles_.emplace(*out, Handle{device, size, one.next_offset, 0, false});
  one.next_offset += size;
  return Code::ok;
}

void Memory::destroy_if_unused(std::unordered_map<MemoryHandle, Handle>::iterator found) {
  const Handle& handle = found->second;
  if (!handle.released || handle.mapped != 0) return;
  Physical& one = physical(handle.device);
  fallocate(one.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(handle.offset),
            static_cast<off_t>(handle.size));
  one.used -= handle.size;
  handles_.erase(found);
}

Code Memory::release(MemoryHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end() || found->second.released) return Code::invalid;
  found->second.released = true;
  destroy_if_unused(found);
  return Code::ok;
}

Memory::Reservation* Memory::reservation_of(Address address, Bytes size, Address* begin) {
  auto found = reservations_.upper_bound(address);
  if (found == reservations_.begin()) return nullptr;
  --found;
  const Bytes offset = address - found->first;
  if (offset >= found->second.size || size > found->second.size - offset) return nullptr;
  *begin = found->first;
  return &found->second;
}

Code Memory::map(Address address, Bytes size, MemoryHandle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = handles_.find(handle);
  if (found == handles_.end() || found->second.released || address % kPage != 0 || size == 0) return Code::invalid;
  if (size != found->second.size) return Code::not_supported;  // a handle is mapped only whole
  Address base = 0;
  Reservation* reservation = reservation_of(address, size, &base);
  if (reservation == nullptr) return Code::invalid;
  const Address end = address + size;
  const auto [gap_begin, gap_end] = gap_around(reservation->mappings, address, end, base, base + reservation->size);
  const auto inside = reservation->mappings.lower_bound(address);
  if (gap_begin > address || (inside != reservation->mappings.end() && inside->first < end)) return Code::invalid;
  const std::int64_t more = mappings_for(address, end, gap_begin, gap_end);
  if (!add_mappings(more)) return Code::out_of_memory;
  void* place = mmap(host_pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                     physical(found->second.device).file, static_cast<off_t>(found->second.offset));
  if (place == MAP_FAILED) {
    host_mappings.fetch_sub(more);
    return Code::out_of_memory;
  }
  ++found->second.mapped;
  reservation->mappings.emplace(address, Mapping{size, handle, {}});
  return Code::ok;
}

Code Memory::unmap(Address address, Bytes size, bool* in_use) {
  const std::lock_guard lock(mutex_);
  Address base = 0;
  Reservation* reservation = size == 0 ? nullptr : reservation_of(address, size, &base);
  if (reservation == nullptr) return Code::invalid;
  // Whole mappings only, without a hole between them.
  const auto first = reservation->mappings.find(address);
  auto last = first;
  Address end = address;
  while (last != reservation->mappings.end() && last->first == end && end < address + size) {
    end += last->second.size;
    ++last;
  }
  if (end != address + size) return Code::invalid;
  *in_use = touched_by_running(address, size);
  if (!*in_use && mmap(host_pointer(address), size, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0) == MAP_FAILED) {
    return Code::out_of_memory;  // the host would have to split a mapping and may not
  }
  for (auto one = first; one != last;) {
    const Address begin = one->first;
    const Mapping mapping = one->second;
    one = reservation->mappings.erase(one);
    const auto [gap_begin, gap_end] =
        gap_around(reservation->mappings, begin, begin + mapping.size, base, base + reservation->size);
    host_mappings.fetch_sub(mappings_for(begin, begin + mapping.size, gap_begin, gap_end));
    const auto handle = handles_.find(mapping.handle);
    --handle->second.mapped;
    if (!*in_use) destroy_if_unused(handle);
  }
  return Code::ok;
}

Code Memory::set_access(Address address, Bytes size, std::vector<int> devices) {
  const std::lock_guard lock(mutex_);
  Address base = 0;
  Reservation* reservation = size == 0 ? nullptr : reservation_of(address, size, &base);
  if (reservation == nullptr) return Code::invalid;
  const auto first = reservation->mappings.find(address);
  auto last = first;
  Address end = address;
  while (last != reservation->mappings.end() && last->first == end && end < address + size) {
    end += last->second.size;
    ++last;
  }
  if (end != address + size) return Code::invalid;
  if (mprotect(host_pointer(address), size, PROT_READ | PROT_WRITE) != 0) return Code::out_of_memory;
  for (auto one = first; one != last; ++one) one->second.devices = devices;
  return Code::ok;
}

std::vector<int> Memory::accessors(Address address) const {
  const std::lock_guard lock(mutex_);
  auto reservation = reservations_.upper_bound(address);
  if (reservation == reservations_.begin()) return {};
  const auto& mappings = std::prev(reservation)->second.mappings;
  auto found = mappings.upper_bound(address);
  if (found == mappings.begin()) return {};
  --found;
  return address - found->first < found->second.size ? found->second.devices : std::vector<int>{};
}

bool Memory::accessible(Address begin, Bytes size) const {
  while (size > 0) {
    Bytes have = 0;
    if (auto found = allocations_.upper_bound(begin); found != allocations_.begin()) {
      --found;
      if (begin - found->first < found->second.size) have = found->second.size - (begin - found->first);
    }
    if (auto found = ready_.upper_bound(begin); have == 0 && found != ready_.begin()) {
      --found;
      if (begin - found->first < found->second) have = found->second - (begin - found->first);
    }
    if (have == 0) {
      auto reservation = reservations_.upper_bound(begin);
      if (reservation == reservations_.begin()) return false;
      --reservation;
      const auto& mappings = reservation->second.mappings;
      auto found = mappings.upper_bound(begin);
      if (found == mappings.begin()) return false;
      --found;
      if (begin - found->first >= found->second.size || found->second.devices.empty()) return false;
      have = found->second.size - (begin - found->first);
    }
    if (have >= size) return true;
    begin += have;
    size -= have;
  }
  return true;
}

bool Memory::touched_by_running(Address begin, Bytes size) const {
  for (const auto& entry : running_)
    for (const Access& access : entry.second)
      if (access.size != 0 && overlap(access.begin, access.size, begin, size)) return true;
  return false;
}

const Access* Memory::enter(const std::vector<Access>& accesses, std::uint64_t* ticket) {
  const std::lock_guard lock(mutex_);
  for (const Access& access : accesses)
    if (!in_range(access.begin, access.size) || !accessible(access.begin, access.size)) return &access;
  *ticket = 0;
  if (!accesses.empty()) {
    *ticket = next_ticket_++;
    running_.emplace(*ticket, accesses);
  }
  return nullptr;
}

void Memory::leave(std::uint64_t ticket) {
  if (ticket == 0) return;
  const std::lock_guard lock(mutex_);
  running_.erase(ticket);
}

bool Memory::known(Address address) const {
  const std::lock_guard lock(mutex_);
  if (auto found = allocations_.upper_bound(address); found != allocations_.begin()) {
    --found;
    if (address - found->first < found->second.size) return true;
  }
  for (const auto& [handle, pool] : pools_) {
    auto piece = pool.pieces.upper_bound(address);
    if (piece != pool.pieces.begin() && address - std::prev(piece)->first < std::prev(piece)->second.size) return true;
  }
  auto found = reservations_.upper_bound(address);
  if (found == reservations_.begin()) return false;
  --found;
  return address - found->first < found->second.size;
}

void Memory::places(const Access& access, std::vector<Place>* out) const {
  Address begin = access.begin;
  Bytes size = access.size;
  if (size == 0 || !in_range(begin, size)) return;
  const std::lock_guard lock(mutex_);
  while (size > 0) {
    // Inside a mapping: the place of the handle. Up to the next mapping: the address itself.
    Bytes run = size;
    std::uint64_t key = begin;
    if (auto reservation = reservations_.upper_bound(begin); reservation != reservations_.begin()) {
      --reservation;
      const auto& mappings = reservation->second.mappings;
      const auto above = mappings.upper_bound(begin);
      if (above != mappings.end()) run = std::min(run, above->first - begin);
      if (above != mappings.begin()) {
        const auto& [start, mapping] = *std::prev(above);
        if (begin - start < mapping.size) {
          const Handle& handle = handles_.at(mapping.handle);
          run = std::min(run, mapping.size - (begin - start));
          key = kPhysicalKey + static_cast<std::uint64_t>(handle.device) * kFileSize + handle.offset + (begin - start);
        }
      }
    }
    out->push_back({key, run, begin});
    begin += run;
    size -= run;
  }
}

}  // namespace streampool::driver::sim
