// What the files of the extension share: errors to exceptions, stream arguments, stacks. Imports the pool and nanobind.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "debug/fault.hpp"
#include "debug/page_guards.hpp"
#include "driver/driver.hpp"
#include "gil.hpp"
#include "pool/core.hpp"
#include "pool/errors.hpp"

namespace streampool::python {

namespace nb = nanobind;

// -- errors (errors.cpp) --------------------------------------------------------------------------------------------
void bind_errors(nb::module_& m);
// Raises what a Failure stands for. Holds the GIL.
[[noreturn]] void raise(pool::Failure& failure);
[[noreturn]] void raise_stream_error(const std::string& text);
[[noreturn]] void raise_driver_error(driver::OpenError kind, const std::string& text);
[[noreturn]] void raise_driver_error(const std::string& text);

// -- stream arguments (streams.cpp) ----------------------------------------------------------------------------------
void bind_streams(nb::module_& m);
// The handle that an argument names: None is the current stream, an int a handle, else __cuda_stream__().
// Raises StreamError for closed objects and other devices' streams, TypeError and ValueError for what is no stream.
driver::StreamHandle stream_handle(nb::handle stream, const pool::Core& core, const char* verb,
                                   bool other_devices = false);
// The same where None is no answer: to record, register or forget the current stream by leaving it out would be a
// guess.
driver::StreamHandle named_stream_handle(nb::handle stream, const pool::Core& core, const char* verb,
                                         bool other_devices = false);
// Raises for what can be no stream. Any stream will do, a closed one too.
void must_look_like_a_stream(nb::handle stream);
// None becomes the current stream, as an object or an int: what a block remembers of its allocation.
nb::object resolve_current(nb::object stream, const pool::Core& core);
driver::EventHandle event_handle(nb::handle event);

// -- stacks (stacks.cpp) ---------------------------------------------------------------------------------------------
void bind_stacks(nb::module_& m);
// Interns the calling thread's stack: so many Python frames, where it has the GIL, and so many native ones. Never
// raises.
debug::StackId capture_stack(int depth, int native_depth = 0) noexcept;
// "file:line in function" of its innermost frame, with the GIL; empty for none.
std::string site_of(debug::StackId stack);
// Its frames, innermost first, with the GIL. Never raises: what cannot be said is left out.
std::vector<debug::SourceFrame> frames_of(debug::StackId stack) noexcept;

// -- the rest: a file each -------------------------------------------------------------------------------------------
void bind_attach(nb::module_& m);
void bind_bench(nb::module_& m);
void bind_dlpack(nb::handle buffer_class);
void bind_buffer(nb::module_& m);
void bind_device(nb::module_& m);
void bind_options(nb::module_& m);
void bind_pool(nb::module_& m);
void bind_pulse(nb::module_& m);
void bind_replay(nb::module_& m);
void bind_scopes(nb::module_& m);
void bind_sim(nb::module_& m);

}  // namespace streampool::python
