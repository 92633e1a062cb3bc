#include "torch_error.hpp"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <typeinfo>

namespace streampool::attach {
namespace {

// c10::SourceLocation.
struct SourceLocation {
  const char* function;
  const char* file;
  std::uint32_t line;
};

// c10::OutOfMemoryError as the symbols of a library give it: its type, its virtual table, and a constructor of its own
// or of its base, c10::Error.
struct OutOfMemoryError {
  using Constructor = void (*)(void* self, SourceLocation, std::string);
  using Destructor = void (*)(void* self);
  std::type_info* type = nullptr;
  void** table = nullptr;  // what an object points to
  Constructor construct = nullptr;
  Destructor destroy = nullptr;
  bool is_found() const { return type != nullptr && table != nullptr && construct != nullptr; }
};

constexpr std::size_t kRoom = 1024;  // for the object; 128 bytes in PyTorch 2.14

OutOfMemoryError find_in(const char* library) {
  OutOfMemoryError found;
  void* const c10 = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (c10 == nullptr) return found;
  found.type = static_cast<std::type_info*>(dlsym(c10, "_ZTIN3c1016OutOfMemoryErrorE"));
  void** const table = static_cast<void**>(dlsym(c10, "_ZTVN3c1016OutOfMemoryErrorE"));
  if (table != nullptr) {
    found.table = table + 2;  // behind the offset and the type
    found.destroy = reinterpret_cast<OutOfMemoryError::Destructor>(found.table[0]);
  }
  for (const char* name :
       {"_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
        "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"}) {
    if (found.construct == nullptr) found.construct = reinterpret_cast<OutOfMemoryError::Constructor>(dlsym(c10, name));
  }
  return found;  // it stays open: it is PyTorch's
}

// Up to PyTorch 2.11 the class has all its code in a header, and each library that throws it has the type and the
// table: libc10_cuda.so does, and needs libc10.so, so that one look finds the constructor too. Types of one name are
// one type.
OutOfMemoryError find() {
  const OutOfMemoryError found = find_in("libc10.so");
  return found.is_found() ? found : find_in("libc10_cuda.so");
}

}  // namespace

void throw_torch_out_of_memory(const std::string& text) {
  const OutOfMemoryError error = find();  // rare: asked anew each time
  if (!error.is_found()) throw std::runtime_error(text);
  void* const object = abi::__cxa_allocate_exception(kRoom);
  try {
    error.construct(object, {"sp_torch_alloc", __FILE__, __LINE__}, text);
  } catch (...) {
    abi::__cxa_free_exception(object);
    throw std::runtime_error(text);
  }
  *static_cast<void**>(object) = error.table;  // where the base was constructed
  abi::__cxa_throw(object, error.type, error.destroy);
}

}  // namespace streampool::attach
