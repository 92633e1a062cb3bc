// Capture on the simulated device: what a capture survives and what loses it, as tried on hardware.
#include "sim_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using testing::Scene;

bool end(const Scene& scene, StreamHandle stream) {
  std::shared_ptr<sim::Graph> graph;
  CHECK(scene.device->end_capture(stream, &graph));
  return graph != nullptr;
}

bool capturing(const Scene& scene, StreamHandle stream) {
  CaptureState state;
  CHECK(scene.device->stream_is_capturing(stream, &state));
  return state.capturing;
}

STREAMPOOL_TEST("captured work is not executed and a capture check harms nothing") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  bool ran = false;
  CHECK(scene.device->begin_capture(s));
  CHECK(scene.device->launch({.stream = s, .body = [&] { ran = true; }}));
  CHECK(capturing(scene, s));
  CHECK(end(scene, s));
  CHECK(!capturing(scene, s));
  CHECK(scene.device->stream_synchronize(s));
  CHECK(!ran);
}

STREAMPOOL_TEST(
    "a graph runs its work at each launch, in the captured order, between what stands before and behind it") {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    sim::Config config;
    config.scheduler = sim::Scheduler::seeded;
    config.seed = seed;
    const Scene scene(config);
    const StreamHandle s = scene.stream(), joined = scene.stream(), t = scene.stream();
    std::vector<int> ran;
    const auto work = [&](StreamHandle stream, int number) {
      CHECK(scene.device->launch({.stream = stream, .body = [&ran, number] { ran.push_back(number); }}));
    };
    CHECK(scene.device->begin_capture(s));
    work(s, 1);
    CHECK(scene.device->stream_wait_event(joined, scene.recorded(s)));
    work(joined, 2);
    work(s, 3);
    CHECK(scene.device->stream_wait_event(s, scene.recorded(joined)));
    work(s, 4);
    std::shared_ptr<sim::Graph> graph;
    CHECK(scene.device->end_capture(s, &graph));
    CHECK(graph != nullptr);
    for (int launch = 0; launch < 2; ++launch) {
      ran.clear();
      work(t, 0);
      CHECK(scene.device->launch_graph(graph, t));
      work(t, 5);
      CHECK(scene.device->stream_synchronize(t));
      CHECK_EQ(ran.size(), std::size_t{6});
      CHECK(ran[0] == 0 && ran[1] == 1 && ran[4] == 4 && ran[5] == 5);
    }
    graph.reset();
    CHECK(scene.device->synchronize());
    CHECK_EQ(scene.device->pending_work(), std::uint64_t{0});
  }
}

STREAMPOOL_TEST("the branches of a graph race, and launches of one graph follow each other on any streams") {
  const Scene scene;
  const StreamHandle s = scene.stream(), joined = scene.stream(), t = scene.stream();
  const Address memory = scene.memory(kMiB);
  const auto captured = [&](bool branches) {
    CHECK(scene.device->begin_capture(s));
    CHECK(scene.device->stream_wait_event(joined, scene.recorded(s)));
    for (const StreamHandle stream : {s, joined})
      if (branches || stream == s)
        CHECK(scene.device->launch({.stream = stream, .accesses = {sim::writes(memory, 64)}}));
    CHECK(scene.device->stream_wait_event(s, scene.recorded(joined)));
    std::shared_ptr<sim::Graph> graph;
    CHECK(scene.device->end_capture(s, &graph));
    return graph;
  };
  const std::shared_ptr<sim::Graph> straight = captured(false), forked = captured(true);
  CHECK(scene.device->launch_graph(straight, s));
  CHECK(scene.device->launch_graph(straight, t));
  CHECK(scene.device->synchronize());
  CHECK_EQ(sim::races().size(), std::size_t{0});
  CHECK(scene.device->launch_graph(forked, s));
  CHECK(scene.device->synchronize());
  CHECK_EQ(sim::races().size(), std::size_t{1});
}

STREAMPOOL_TEST("what a graph retains ends once, with the last holder and the last launch, or with a lost capture") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  int ended = 0;
  const auto end_one = [](void* count) { ++*static_cast<int*>(count); };
  const auto begin = [&] {
    CHECK(scene.device->begin_capture(s));
    CaptureState state;
    CHECK(scene.device->stream_is_capturing(s, &state));
    CHECK(scene.device->graph_retain(s, state.id, end_one, &ended));
    return state.id;
  };
  const std::uint64_t first = begin();
  const auto gate = std::make_shared<sim::Gate>();
  CHECK(scene.device->launch({.stream = s, .gate = gate}));
  std::shared_ptr<sim::Graph> graph;
  CHECK(scene.device->end_capture(s, &graph));
  CHECK(scene.device->launch_graph(graph, s));
  graph.reset();
  CHECK(sim::settle());
  CHECK_EQ(ended, 0);
  gate->open();
  CHECK(scene.device->synchronize());
  CHECK_EQ(ended, 1);

  begin();
  std::uint64_t id = 0;
  CHECK(!scene.device->stream_id(s, &id));  // loses the capture
  CHECK_EQ(scene.device->graph_retain(s, first + 1, end_one, &ended).number, 901);
  CHECK_EQ(ended, 1);
  CHECK(!end(scene, s));
  CHECK_EQ(ended, 2);

  begin();
  CHECK(scene.device->graph_retain(s, first, end_one, &ended).code == Code::invalid);  // another capture's id
  CHECK(scene.device->stream_destroy(s));
  CHECK_EQ(ended, 3);
}

STREAMPOOL_TEST("asking the id of a capturing stream loses the capture") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  std::uint64_t id = 0;
  CHECK(scene.device->begin_capture(s));
  const Status status = scene.device->stream_id(s, &id);
  CHECK(status.code == Code::capturing);
  CHECK_EQ(status.number, 900);
  CHECK(capturing(scene, s));
  CHECK(!end(scene, s));
  CHECK(scene.device->stream_id(s, &id));
}

STREAMPOOL_TEST("waiting for a capturing stream, or asking whether it is done, loses the capture") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  for (int i = 0; i < 3; ++i) {
    CHECK(scene.device->begin_capture(s));
    const Status status = i == 0   ? scene.device->stream_query(s)
                          : i == 1 ? scene.device->stream_synchronize(s)
                                   : scene.device->synchronize();
    CHECK_EQ(status.number, 900);
    CHECK(!end(scene, s));
  }
}

STREAMPOOL_TEST("the legacy stream may not be touched while a blocking stream captures") {
  const Scene scene;
  const StreamHandle blocking = scene.stream(true), s = scene.stream();
  const EventHandle e = scene.event();
  CHECK(scene.device->begin_capture(s));
  CHECK(scene.device->event_record(e, kDefaultStream));
  CHECK(end(scene, s));
  CHECK(scene.device->begin_capture(blocking));
  CaptureState state;
  CHECK_EQ(scene.device->stream_is_capturing(kDefaultStream, &state).number, 906);  // harms nothing
  CHECK(end(scene, blocking));
  CHECK(scene.device->begin_capture(blocking));
  CHECK_EQ(scene.device->event_record(e, kDefaultStream).number, 906);
  CHECK(!end(scene, blocking));
  CHECK(scene.device->begin_capture(blocking));
  CHECK_EQ(scene.device->launch({.stream = kLegacyStream}).number, 906);
  CHECK(!end(scene, blocking));
  CHECK_EQ(scene.device->begin_capture(kLegacyStream).number, 900);
}

STREAMPOOL_TEST("a context event loses every capture") {
  const Scene scene;
  const StreamHandle s = scene.stream(), t = scene.stream();
  CHECK(scene.device->begin_capture(s));
  CHECK(scene.device->begin_capture(t));
  CHECK_EQ(scene.device->context_event_record(scene.event()).number, 900);
  CHECK(!end(scene, s));
  CHECK(!end(scene, t));
}

STREAMPOOL_TEST("querying a captured event is refused and loses the capture; old events may be queried") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  const EventHandle old = scene.recorded(s);
  CHECK(sim::settle());
  CHECK(scene.device->begin_capture(s));
  CHECK(scene.device->event_query(old));
  const EventHandle late = scene.recorded(s);
  CHECK(end(scene, s));
  CHECK(scene.device->begin_capture(s));
  CHECK(scene.device->event_record(late, s));
  CHECK_EQ(scene.device->event_query(late).number, 907);
  CHECK(!end(scene, s));
  CHECK(scene.device->event_record(late, s));
  CHECK(scene.query(late) == Code::ok);
}

STREAMPOOL_TEST("other streams join by a captured event and must come back") {
  const Scene scene;
  const StreamHandle s = scene.stream(), t = scene.stream();
  for (const bool back : {true, false}) {
    CHECK(scene.device->begin_capture(s));
    const EventHandle fork = scene.recorded(s), join = scene.event();
    CHECK(scene.device->stream_wait_event(t, fork));
    CHECK(capturing(scene, t));
    CHECK(scene.device->launch({.stream = t}));
    CHECK(scene.device->event_record(join, t));
    if (back) CHECK(scene.device->stream_wait_event(s, join));
    CHECK_EQ(end(scene, s), back);
    CHECK(!capturing(scene, t));
  }
}

STREAMPOOL_TEST("a capture that would depend on uncaptured work is lost") {
  const Scene scene;
  const StreamHandle s = scene.stream(), t = scene.stream();
  const EventHandle outside = scene.recorded(t);
  CHECK(scene.device->begin_capture(s));
  CHECK_EQ(scene.device->stream_wait_event(s, outside).number, 905);
  CHECK(!end(scene, s));
}

STREAMPOOL_TEST("memory may be had and freed while a stream captures") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  CHECK(scene.device->begin_capture(s));
  CHECK(scene.device->mem_free(Kind::device, scene.memory(4096)));
  CHECK(end(scene, s));
}

STREAMPOOL_TEST("a capturing stream that is destroyed takes its capture with it") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  CHECK(scene.device->begin_capture(s));
  CHECK(scene.device->stream_destroy(s));
  const StreamHandle t = scene.stream();
  CHECK(!capturing(scene, t));
}

STREAMPOOL_TEST(
    "an event that is to be in no capture is given up where one begins between the question and the record") {
  const Scene scene;
  const StreamHandle s = scene.stream();
  for (const Call moment : {Call::event_create, Call::event_record}) {
    scene.device->before_call(moment, [&] { CHECK(scene.device->begin_capture(s)); });
    EventHandle event = 1;
    bool captured = false;
    record_uncaptured(*scene.device, s, std::nullopt, &event, &captured);
    CHECK(captured);
    CHECK_EQ(event, EventHandle{0});
    CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
    CHECK(end(scene, s));
  }
}

STREAMPOOL_TEST("a stream is made to wait for another one where neither captures, and else neither is touched") {
  const Scene scene(testing::seeded());
  const StreamHandle s = scene.stream(), waiter = scene.stream();
  EventHandle event = 0;
  bool captured = true;
  {
    const auto gate = scene.gated(s);
    CHECK(record_uncaptured(*scene.device, s, waiter, &event, &captured));
    CHECK(!captured);
    bool ran = false;
    CHECK(scene.device->launch({.stream = waiter, .body = [&] { ran = true; }}));
    CHECK(sim::settle());
    CHECK(!ran);
    gate->open();
    CHECK(sim::settle());
    CHECK(ran);
    CHECK(scene.device->event_destroy(event));
  }
  for (const StreamHandle capturing : {s, waiter}) {
    CHECK(scene.device->begin_capture(capturing));
    CHECK(record_uncaptured(*scene.device, s, waiter, &event, &captured));
    CHECK(captured);
    CHECK_EQ(event, EventHandle{0});
    CHECK(end(scene, capturing));
  }
  // A capture that begins on the recorded stream meanwhile takes the other one along nowhere.
  scene.device->before_call(Call::event_record, [&] { CHECK(scene.device->begin_capture(s)); });
  record_uncaptured(*scene.device, s, waiter, &event, &captured);
  CHECK(captured);
  CHECK(!capturing(scene, waiter));
  CHECK(end(scene, s));
  // Nor is the other one's capture touched that begins meanwhile.
  for (const Call moment : {Call::event_create, Call::event_record}) {
    scene.device->before_call(moment, [&] { CHECK(scene.device->begin_capture(waiter)); });
    record_uncaptured(*scene.device, s, waiter, &event, &captured);
    CHECK(captured);
    CHECK(end(scene, waiter));
  }
  CHECK_EQ(scene.device->live_events(), std::uint64_t{0});
}

}  // namespace
