// See graph.hpp; and the simulated device's calls for captures and graphs.
#include "graph.hpp"

#include <map>

#include "device.hpp"

namespace streampool::driver::sim {
namespace {

thread_local bool running_graph = false;

}  // namespace

bool in_graph() { return running_graph; }

// Nobody can launch it any more, and what was launched has run: who is told so may count on that.
Graph::~Graph() {
  if (const std::shared_ptr<Machine> machine = machine_.lock(); machine && !objects_.empty()) {
    const Lock lock(machine->mutex);
    done.give_to(machine->host);
  }
  for (const auto& [ended, object] : objects_) ended(object);
}

Status SimDevice::begin_capture(StreamHandle handle) {
  constexpr Call call = Call::stream_begin_capture;
  if (const Status status = enter(call); !status) return status;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->legacy || stream->capture) return fail(call, Code::capturing, kCaptureUnsupported);
  auto capture = std::make_shared<Capture>();
  capture->id = ++machine_->captures;
  capture->origin = stream;
  capture->graph = std::make_shared<Graph>(machine_);
  machine_->join_capture(stream, capture);
  return {};
}

Status SimDevice::end_capture(StreamHandle handle, std::shared_ptr<Graph>* out) {
  constexpr Call call = Call::stream_end_capture;
  out->reset();
  if (const Status status = enter(call); !status) return status;
  Trash trash;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  const CapturePtr capture = stream->capture;
  if (!capture || capture->origin.lock() != stream) return fail(call, Code::invalid, kCaptureUnmatched);
  // All work of streams that joined must have come back to the one that began.
  for (const auto& [id, work] : capture->last_work)
    if (id != stream->id && stream->captured[id] < work) machine_->invalidate(capture);
  if (capture->valid) *out = capture->graph;
  machine_->end_capture(capture, trash);
  return {};
}

Status SimDevice::graph_retain(StreamHandle handle, std::uint64_t capture, void (*ended)(void*), void* object) {
  constexpr Call call = Call::graph_retain;
  if (const Status status = enter(call); !status) return status;
  const Lock lock(machine_->mutex);
  const StreamPtr stream = machine_->find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (!stream->capture || stream->capture->id != capture) return fail(call, Code::invalid, kInvalidValue);
  if (!stream->capture->valid) return fail(call, Code::capturing, kCaptureInvalidated);
  stream->capture->graph->retain(ended, object);
  return {};
}

// The captured streams become streams of the machine's own for this launch: between a mark on the launching stream
// that all of it follows, and one that follows all of it.
Status SimDevice::launch_graph(const std::shared_ptr<Graph>& graph, StreamHandle handle) {
  constexpr Call call = Call::graph_launch;
  if (const Status status = enter(call); !status) return status;
  std::vector<std::vector<std::pair<Place, bool>>> places;
  for (const Graph::Piece& piece : graph->pieces) places.push_back(places_of(piece.touched));
  Trash trash;
  const Lock lock(machine_->mutex);
  Machine& machine = *machine_;
  const StreamPtr stream = machine.find_stream(state_, handle, call);
  if (!stream) return fail(call, Code::failed, kDeadHandle);
  if (stream->capture) return captured_away(call, stream, kCaptureUnsupported);  // no graphs inside graphs here
  if (stream->legacy && machine.blocking_capture(state_, true)) return fail(call, Code::capturing, kCaptureImplicit);

  const NodePtr begin = machine.new_node(*stream->device, stream);
  machine.enqueue(begin);
  machine.depend(begin, graph->last);
  stream->clock.join(graph->done, machine.host);
  const Clock before = stream->clock;
  machine.start(begin, trash);
  struct Placed {
    NodePtr node;
    Clock clock;
  };
  std::map<std::uint64_t, StreamPtr> inner;
  std::map<std::pair<std::uint64_t, std::uint64_t>, Placed> placed;
  for (std::size_t i = 0; i < graph->pieces.size(); ++i) {
    const Graph::Piece& piece = graph->pieces[i];
    StreamPtr& own = inner[piece.stream];
    const bool first = own == nullptr;
    if (first) {
      own = machine.make_stream(*piece.device, false, piece.stream_name + " in a graph");
      own->clock = before;
    }
    const NodePtr node = machine.new_node(*piece.device, own);
    node->task = true;
    node->foreign = piece.foreign;
    node->body = [graph, body = piece.body] {
      const bool outer = std::exchange(running_graph, true);  // work may pause, and run other work inside
      if (body) (*body)();
      running_graph = outer;
    };
    node->accesses = piece.accesses;
    node->label = piece.label;
    machine.enqueue(node);
    if (first) machine.depend(node, begin);
    for (const auto& after : piece.after) {
      const auto found = placed.find(after);
      if (found == placed.end()) continue;
      machine.depend(node, found->second.node);
      own->clock.join(found->second.clock, machine.host);
    }
    machine.touch(*own, places[i], piece.label, piece.stack);
    placed[{piece.stream, piece.number}] = {node, own->clock};
    if (piece.gate) machine.hold_at_gate(node, piece.gate);
    machine.start(node, trash);
  }
  const NodePtr end = machine.new_node(*stream->device, stream);
  machine.enqueue(end);
  for (const auto& [id, own] : inner) {
    machine.depend(end, own->tail);
    stream->clock.join(own->clock, machine.host);
    machine.end_inner(own);
  }
  graph->last = end;
  graph->done.join(stream->clock, machine.host);
  machine.start(end, trash);
  return {};
}

}  // namespace streampool::driver::sim
