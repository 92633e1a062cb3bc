// Buffer.__dlpack__: the block to other libraries, without a copy. The borrower's stream is made to wait for the
// block's own, and is declared as one that uses the block; the host waits where the borrower is the host.
#include "dlpack.hpp"

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "arguments.hpp"
#include "pool_objects.hpp"
#include "support.hpp"

namespace streampool::python {
namespace {

using dlpack::Device;

constexpr OptionalFlag kCopy{"copy"};
constexpr Whole<std::int64_t> kConsumerStream{"stream", "a stream's handle, None or -1", -1};

// What a borrower holds: its share of the lease, and the arrays that its tensor points to.
struct Loan {
  explicit Loan(std::shared_ptr<Lease> of) : lease(std::move(of)) {
    const std::lock_guard lock(lease->counting);
    if (lease->borrowers.fetch_add(1) == 0) pool::Core::set_exported(lease->block, true);
  }
  ~Loan() {
    const std::lock_guard lock(lease->counting);
    if (lease->borrowers.fetch_sub(1) == 1) pool::Core::set_exported(lease->block, false);
  }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  std::shared_ptr<Lease> lease;
  std::int64_t shape = 0;
  std::int64_t stride = 1;
};

template <typename Record>
void delete_record(Record* record) {
  delete static_cast<Loan*>(record->context);
  delete record;
}

template <typename Record>
void destroy_capsule(PyObject* capsule, const char* name) {
  // A capsule that was taken has another name, and its record is the taker's.
  if (PyCapsule_IsValid(capsule, name) == 0) return;
  auto* record = static_cast<Record*>(PyCapsule_GetPointer(capsule, name));
  record->deleter(record);
}

template <typename Record>
nb::object in_capsule(std::unique_ptr<Record> record, std::unique_ptr<Loan> loan, const char* name,
                      PyCapsule_Destructor destructor) {
  record->context = loan.get();
  record->deleter = delete_record<Record>;
  nb::object capsule = nb::steal(PyCapsule_New(record.get(), name, destructor));
  if (!capsule.is_valid()) throw nb::python_error();
  record.release();
  loan.release();
  return capsule;
}

Device own_device(const PyBuffer& b) {
  if (b.core->driver().simulated()) return {dlpack::kCpu, 0};
  switch (b.core->kind()) {
    case Kind::pinned: return {dlpack::kCudaHost, 0};
    case Kind::managed: return {dlpack::kCudaManaged, 0};
    case Kind::device: break;
  }
  return {dlpack::kCuda, b.core->driver().ordinal()};
}

std::pair<std::int64_t, std::int64_t> pair_of(nb::handle given, const char* name) {
  constexpr const char* kWanted = "a pair of whole numbers";
  const auto two = items(given, name, kWanted);
  if (two.size() != 2) refuse(PyExc_ValueError, name, kWanted, given);
  const Whole<std::int32_t> number{name, kWanted};
  return {convert(two[0], number), convert(two[1], number)};
}

// The device to say; the block must be there as it is.
Device device_for(const PyBuffer& b, nb::handle asked) {
  const Device own = own_device(b);
  if (asked.is_none()) return own;
  const auto [type, id] = pair_of(asked, "dl_device");
  if (type == own.type && id == own.id) return own;
  if (type == dlpack::kCpu && id == 0 && host_accessible(b)) return {dlpack::kCpu, 0};
  throw nb::buffer_error(("__dlpack__: the block is on DLPack's device (" + std::to_string(own.type) + ", " +
                          std::to_string(own.id) + "), not on (" + std::to_string(type) + ", " + std::to_string(id) +
                          "), and is not copied; use copy_to")
                             .c_str());
}

// Orders the borrower after what is queued on the block's stream. `given` is None, -1 (the borrower sees to it), or the
// handle of the borrower's stream.
void order_borrower(PyBuffer& b, nb::handle given, const Device& device) {
  pool::Core& core = *b.core;
  const bool host = device.type == dlpack::kCpu || device.type == dlpack::kCudaHost;
  driver::StreamHandle theirs = driver::kLegacyStream;
  if (!given.is_none()) {
    const auto number = static_cast<std::int64_t>(convert(given, kConsumerStream));
    if (number == -1) return;
    if (number == 0)
      refuse(PyExc_ValueError, "stream", "1 (the legacy stream), 2 (the per-thread one), another handle, None or -1",
             given);
    theirs = static_cast<driver::StreamHandle>(number);
  }
  const driver::StreamHandle ours = own_stream_handle(b, nb::none(), "__dlpack__");
  // Managed memory without a stream: the borrower may be the host.
  if (host || (device.type == dlpack::kCudaManaged && given.is_none())) {
    wait_for_stream(core, ours, "__dlpack__");
    return;
  }
  if (theirs == ours || (driver::is_legacy(theirs) && driver::is_legacy(ours))) return;
  // Only work that is captured, or is not, on both sides can be ordered; and a stream that is made to join a capture
  // would have to be joined back.
  const std::uint64_t our_capture = capture_of(core, ours, "__dlpack__");
  const std::uint64_t their_capture = capture_of(core, theirs, "__dlpack__");
  if (our_capture != their_capture)
    refuse_capture(our_capture != 0 ? ours : theirs, "__dlpack__",
                   our_capture != 0 ? "the borrower's stream is not in that capture: make it wait for the block's first"
                                    : "the block's stream is not in that capture: export the block before the capture");
  driver::Driver& d = core.driver();
  bool captured = false;
  const driver::Status status = unlocked([&] {
    driver::EventHandle event = 0;
    driver::Status s;
    if (our_capture == 0) {
      s = driver::record_uncaptured(d, ours, theirs, &event, &captured);
    } else {
      s = d.event_create(&event);
      if (!s.ok()) return s;
      s = d.event_record(event, ours);
      if (s.ok()) s = d.stream_wait_event(theirs, event);
    }
    if (event != 0) d.event_destroy(event);
    return s;
  });
  if (captured) refuse_capture(ours, "__dlpack__", "or the borrower's stream is: export the block before the capture");
  if (!status.ok()) raise_driver_error("__dlpack__: " + driver::describe(status));
  guarded([&](pool::Failure* f) { return core.record_stream(b.block, theirs, f); });
}

nb::object export_block(PyBuffer& b, nb::handle stream, nb::handle max_version, nb::handle dl_device,
                        Given<kCopy> copy) {
  must_be_open(b, "__dlpack__");
  if (copy->value_or(false)) throw nb::buffer_error("__dlpack__: the block is not copied; use copy_to");
  const bool versioned = !max_version.is_none() && pair_of(max_version, "max_version").first >= dlpack::kVersion.major;
  const Device device = device_for(b, dl_device);
  // Lent before anything below lets other threads in: from here on nobody can close the buffer. The arguments may have
  // run Python that did.
  must_be_open(b, "__dlpack__");
  if (!b.lease) {
    b.lease = std::make_shared<Lease>();
    b.lease->core = b.core;
    b.lease->block = b.block;
  }
  auto loan = std::make_unique<Loan>(b.lease);
  order_borrower(b, stream, device);
  must_be_open(b, "__dlpack__");  // its block may have been freed by address meanwhile
  loan->shape = static_cast<std::int64_t>(b.size);
  void* const data = b.size == 0 ? nullptr : reinterpret_cast<void*>(b.block.address);
  const dlpack::Tensor tensor{data, device, 1, {1, 8, 1}, &loan->shape, &loan->stride, 0};
  if (versioned) {
    auto record = std::make_unique<dlpack::ManagedVersioned>();
    record->version = dlpack::kVersion;
    record->flags = 0;
    record->tensor = tensor;
    return in_capsule(std::move(record), std::move(loan), dlpack::kNameVersioned, [](PyObject* capsule) {
      destroy_capsule<dlpack::ManagedVersioned>(capsule, dlpack::kNameVersioned);
    });
  }
  auto record = std::make_unique<dlpack::Managed>();
  record->tensor = tensor;
  return in_capsule(std::move(record), std::move(loan), dlpack::kName,
                    [](PyObject* capsule) { destroy_capsule<dlpack::Managed>(capsule, dlpack::kName); });
}

}  // namespace

Lease::~Lease() {
  if (!orphan.load()) return;
  core->release(block);
  pool::Core::leave(std::move(core));
}

void bind_dlpack(nb::handle buffer_class) {
  auto buffer = nb::borrow<nb::class_<PyBuffer>>(buffer_class);
  buffer
      .def("__dlpack__", &export_block, nb::kw_only(), nb::arg("stream").none() = nb::none(),
           nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
           parameter<kCopy>() = nb::none(),
           "The block as a DLPack capsule of bytes. `stream` is the borrower's: it is made to wait for the block's own "
           "and counts as one that uses the block. Raises BufferError for another device and for copy=True.")
      .def("__dlpack_device__", [](const PyBuffer& b) {
        const Device device = own_device(b);
        return nb::make_tuple(device.type, device.id);
      });
}

}  // namespace streampool::python
