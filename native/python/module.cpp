// The extension module streampool._core: one bind function a file.
#include "support.hpp"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  using namespace streampool::python;
  m.doc() = "The native core of streampool. Everything here is wrapped by the package's public modules.";
  bind_errors(m);
  bind_device(m);
  bind_options(m);
  bind_streams(m);
  bind_stacks(m);
  bind_scopes(m);
  bind_pool(m);
  bind_pulse(m);
  bind_buffer(m);
  bind_attach(m);
  bind_replay(m);
  bind_bench(m);
  bind_sim(m);
}
