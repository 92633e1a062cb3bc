// See session.hpp.
#include "session.hpp"

#include "errors.hpp"

namespace streampool::driver::cuda {

bool Session::alive() const {
  unsigned long long now = 0;
  return dead.load(std::memory_order_relaxed) == 0 && ending() == Ending::no &&
         api->cuCtxGetId(context, &now) == kSuccess && now == generation;
}

Status Session::status(Call call, Result result) {
  if (result == kSuccess) return {};
  Code code = code_of(result);
  // These two may also be about somebody else's context, that of a foreign stream or event: then ours lives on.
  if ((result == kInvalidContext || result == kContextIsDestroyed) && alive()) code = Code::invalid;
  const bool final = code == Code::lost || code == Code::gone;
  if (final && ending() == Ending::no) {
    int none = 0;
    dead.compare_exchange_strong(none, result, std::memory_order_relaxed);
  }
  return {code, result, kCallNames[static_cast<std::size_t>(call)]};
}

Scope::Scope(Session& session) : session_(session) { result_ = enter(); }

Result Scope::enter() {
  const Ending now = ending();
  if (now != Ending::no) return now == Ending::forked ? kNotInitialized : kDeinitialized;
  if (const int dead = session_.dead.load(std::memory_order_relaxed)) return dead;
  const Api& api = *session_.api;

  Context current = nullptr;
  if (const Result r = api.cuCtxGetCurrent(&current)) return r;
  // A context that was reset in the meantime takes its events, streams and memory with it: their handles must not be
  // touched again, even though the context's own handle may be good for a new life.
  unsigned long long generation = 0;
  if (const Result r = api.cuCtxGetId(session_.context, &generation))
    return code_of(r) == Code::gone ? r : kContextIsDestroyed;
  if (generation != session_.generation) return kContextIsDestroyed;

  int mode = kCaptureModeRelaxed;
  if (const Result r = api.cuThreadExchangeStreamCaptureMode(&mode)) return r;
  mode_ = mode;
  mode_changed_ = mode != kCaptureModeRelaxed;
  if (current != session_.context) {
    if (const Result r = api.cuCtxPushCurrent(session_.context)) return r;
    pushed_ = true;
  }
  return kSuccess;
}

Scope::~Scope() {
  const Api& api = *session_.api;
  if (pushed_) {
    Context ours = nullptr;
    api.cuCtxPopCurrent(&ours);
  }
  if (mode_changed_) api.cuThreadExchangeStreamCaptureMode(&mode_);
}

}  // namespace streampool::driver::cuda
