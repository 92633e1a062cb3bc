// Capture on the simulated device: what a capture survives and what loses it, as tried on hardware.
#include "sim_scene.hpp"
#include "test.hpp"

namespace {

using namespace streampool;
using namespace streampool::driver;
using testing::Scene;

bool end(const Scene& scene, StreamHandle stream) {
  bool valid = false;
  CHECK(scene.device->end_capture(stream, &valid));
  return valid;
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

}  // namespace
