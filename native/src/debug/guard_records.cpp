#include "guard_records.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <set>

namespace streampool::debug {

namespace {

// History is thrown away when it is most of so much.
constexpr Bytes kCompactAt = 16 * kMiB;

std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(byte));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string seconds(double time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6f", time);
  return text;
}

std::string event(const char* name, std::uint64_t number, const char* of = "serial") {
  return std::string("{\"event\":\"") + name + "\",\"" + of + "\":" + std::to_string(number);
}

// A stream is a number, a capture the words that reports have for it: its id with the mark is beyond what many readers
// of JSON keep.
std::string stream_json(std::uint64_t id) {
  return (id & kCapturedId) != 0 ? "\"capture " + std::to_string(id & ~kCapturedId) + '"' : std::to_string(id);
}

std::string stream_event(const char* name, std::uint64_t stream) {
  return std::string("{\"event\":\"") + name + "\",\"stream\":" + stream_json(stream);
}

// The files of this process. Leaked: pools may outlive statics.
struct Paths {
  std::mutex mutex;
  std::set<std::string> open;
};
Paths& paths() {
  static Paths* p = new Paths;
  return *p;
}

std::string own_path(std::string path) {
  for (std::size_t at; (at = path.find("%p")) != std::string::npos;) path.replace(at, 2, std::to_string(::getpid()));
  Paths& p = paths();
  const std::lock_guard lock(p.mutex);
  const std::size_t dot = path.find('.', path.rfind('/') + 1);
  std::string own = path;
  for (int n = 2; !p.open.insert(own).second; ++n)
    own = path.substr(0, dot) + "-" + std::to_string(n) + (dot == std::string::npos ? "" : path.substr(dot));
  return own;
}

void give_up_path(const std::string& path) {
  Paths& p = paths();
  const std::lock_guard lock(p.mutex);
  p.open.erase(path);
}

bool write_all(int file, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t some = ::write(file, text.data() + done, text.size() - done);
    if (some < 0 && errno == EINTR) continue;
    if (some <= 0) return false;
    done += static_cast<std::size_t>(some);
  }
  return true;
}

}  // namespace

GuardRecords::~GuardRecords() {
  if (file_ >= 0) ::close(file_);
  if (!path_.empty()) give_up_path(path_);
}

bool GuardRecords::open(const std::string& path, const std::string& pool, const std::string& device, std::uint64_t seed,
                        std::string* error) {
  path_ = own_path(path);
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) {
    *error = "'" + path_ + "' cannot be written: " + std::strerror(errno);
    return false;
  }
  head_ = "{\"schema\":\"urn:streampool:page-guards:1\",\"pid\":" + std::to_string(::getpid()) +
          ",\"pool\":" + json_text(pool) + ",\"device\":" + json_text(device) + ",\"seed\":" + std::to_string(seed) +
          "}\n";
  const std::lock_guard lock(mutex_);
  write(head_);
  return true;
}

void GuardRecords::write(const std::string& line) {
  if (file_ < 0) return;
  if (write_all(file_, line)) {
    written_ += line.size();
    if (written_ >= kCompactAt) compact();
    return;
  }
  ::close(file_);
  file_ = -1;
}

void GuardRecords::keep(std::uint64_t serial, const std::string& line) {
  blocks_[serial] += line;
  write(line);
}

void GuardRecords::write_stack(StackId stack, const ResolveStack& resolve) {
  if (stack == 0) return;
  {
    const std::lock_guard lock(mutex_);
    if (file_ < 0 || stacks_.contains(stack)) return;
  }
  std::string line = event("stack", stack, "stack") + ",\"frames\":[";
  bool first = true;
  if (resolve)
    for (const SourceFrame& frame : resolve(stack)) {
      line += std::string(first ? "" : ",") + "{\"file\":" + json_text(frame.file) +
              ",\"line\":" + std::to_string(frame.line) + ",\"function\":" + json_text(frame.function) + "}";
      first = false;
    }
  line += "]}\n";
  const std::lock_guard lock(mutex_);
  if (stacks_.emplace(stack, line).second) write(line);
}

void GuardRecords::allocated(const BlockFacts& block, const ResolveStack& resolve) {
  write_stack(block.allocated_at, resolve);
  const std::lock_guard lock(mutex_);
  keep(block.serial, event("allocated", block.serial) + ",\"address\":" + std::to_string(block.address) +
                         ",\"size\":" + std::to_string(block.size) + ",\"begin\":" + std::to_string(block.begin) +
                         ",\"reserved\":" + std::to_string(block.reserved) + ",\"pages\":\"" +
                         std::string(page_guard_word(block.pages)) + "\",\"stream\":" + stream_json(block.stream) +
                         ",\"thread\":" + std::to_string(block.allocated_thread) + ",\"time\":" +
                         seconds(block.allocated_time) + ",\"stack\":" + std::to_string(block.allocated_at) +
                         ",\"raw\":" + (block.raw ? "true" : "false") + ",\"tag\":" + json_text(block.tag) + "}\n");
  idle_[block.stream] = false;
}

void GuardRecords::used_on(std::uint64_t serial, std::uint64_t stream) {
  const std::lock_guard lock(mutex_);
  if (!blocks_.contains(serial)) return;
  keep(serial, event("used_on", serial) + ",\"stream\":" + stream_json(stream) + "}\n");
  idle_[stream] = false;
}

void GuardRecords::freed(const BlockFacts& block, const ResolveStack& resolve) {
  write_stack(block.freed_at, resolve);
  const std::lock_guard lock(mutex_);
  keep(block.serial, event("freed", block.serial) + ",\"stream\":" + stream_json(block.stream) + ",\"thread\":" +
                         std::to_string(block.freed_thread) + ",\"time\":" + seconds(block.freed_time) +
                         ",\"stack\":" + std::to_string(block.freed_at) + "}\n");
}

void GuardRecords::revoked(std::uint64_t serial) {
  const std::lock_guard lock(mutex_);
  keep(serial, event("revoked", serial) + "}\n");
}

void GuardRecords::dropped(std::uint64_t serial) {
  const std::lock_guard lock(mutex_);
  blocks_.erase(serial);
  write(event("dropped", serial) + "}\n");
}

void GuardRecords::named(std::uint64_t stream) {
  const std::lock_guard lock(mutex_);
  const auto at = idle_.find(stream);
  if (at == idle_.end() || !at->second) return;
  at->second = false;
  write(stream_event("named", stream) + "}\n");
}

void GuardRecords::idle(std::uint64_t stream) {
  const std::lock_guard lock(mutex_);
  const auto at = idle_.find(stream);
  if (at == idle_.end() || at->second) return;
  at->second = true;
  write(stream_event("idle", stream) + "}\n");
}

void GuardRecords::lost(const std::string& error) {
  const std::lock_guard lock(mutex_);
  write("{\"event\":\"lost\",\"error\":" + json_text(error) + "}\n");
}

// The same file without its history, put in its place in one step.
void GuardRecords::compact() {
  std::string text = head_;
  for (const auto& [stack, line] : stacks_) text += line;
  for (const auto& [serial, lines] : blocks_) text += lines;
  for (const auto& [stream, is_idle] : idle_)
    if (is_idle) text += stream_event("idle", stream) + "}\n";
  const Bytes size = text.size();
  const std::string beside = path_ + ".new";
  const int file = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
  // What cannot be made smaller goes on as it is, and is looked at again when it has doubled.
  written_ = 0;
  if (file < 0) return;
  if (size > kCompactAt / 2 || !write_all(file, text) || ::rename(beside.c_str(), path_.c_str()) != 0) {
    ::close(file);
    ::unlink(beside.c_str());
    return;
  }
  ::close(file_);
  file_ = file;
  written_ = size;
}

}  // namespace streampool::debug
