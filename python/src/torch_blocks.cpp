// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/torch_blocks.h"

#include <nanobind/stl/string.h>

#include <map>
#include <string>
#include <utility>

#include "ortrain/base/error.h"
#include "python/src/device.h"
#include "python/src/tensor_exchange.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

// What is called for every result of every step. Never destroyed: the interpreter goes first.
class Torch {
 public:
  // Guarded by the interpreter's lock, as exchange_table().
  static Torch& instance() {
    static Torch* torch = nullptr;
    if (torch == nullptr) torch = new Torch();
    return *torch;
  }

  nb::object empty(nb::handle size, DType dtype, dlpack::Device place) {
    return empty_(size, nb::arg("dtype") = dtype_of(dtype), nb::arg("device") = device_of(place));
  }

 private:
  nb::handle dtype_of(DType dtype) {
    nb::object& found = dtypes_[dtype];
    if (!found.is_valid()) found = torch_.attr(std::string(ortrain::name_of(dtype)).c_str());
    return found;
  }
  nb::handle device_of(dlpack::Device place) {
    nb::object& found = devices_[{place.type, place.id}];
    if (!found.is_valid()) found = torch_.attr("device")(name_of(place));
    return found;
  }

  nb::module_ torch_ = nb::module_::import_("torch");
  nb::object empty_ = torch_.attr("empty");
  std::map<DType, nb::object> dtypes_;
  std::map<std::pair<int32_t, int32_t>, nb::object> devices_;
};

nb::object tuple_of(const Dims& dims) {
  nb::object tuple = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(dims.size())));
  for (size_t i = 0; i < dims.size(); ++i) {
    PyTuple_SetItem(tuple.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromLongLong(dims[i]));
  }
  return tuple;
}

// Deletes the blocks that are made here.
struct TensorMemory {
  PyObject* held;  // the tensor, or its storage
  dlpack::Device place;
  bool is_storage = false;

  void operator()(Block* block) const {
    delete block;
    if (!nb::is_alive()) return;  // the interpreter is gone, and with it the memory
    nb::gil_scoped_acquire lock;
    Py_DECREF(held);
  }
};

// Who reads of memory tries again with less of it: other errors of PyTorch are told as such.
[[noreturn]] void throw_allocation_error(const nb::python_error& error, size_t bytes,
                                         dlpack::Device place) {
  const std::string text = error.what();
  const std::string first = text.substr(0, text.find('\n'));
  const bool is_memory = error.matches(nb::module_::import_("torch").attr("OutOfMemoryError")) ||
                         error.matches(PyExc_MemoryError) ||
                         text.find("can't allocate memory") != std::string::npos;
  if (is_memory) {
    throw OutOfMemoryError(
        str("PyTorch has no ", bytes, " bytes on ", name_of(place), ": ", first));
  }
  throw DeviceError(
      str("PyTorch makes no tensor of ", bytes, " bytes on ", name_of(place), ": ", first));
}

}  // namespace

std::vector<std::shared_ptr<Block>> torch_blocks(dlpack::Device place,
                                                 std::span<const TensorSpec* const> specs) {
  std::vector<std::shared_ptr<Block>> blocks;
  if (specs.empty()) return blocks;
  blocks.reserve(specs.size());
  nb::gil_scoped_acquire lock;
  Torch& torch = Torch::instance();
  for (const TensorSpec* spec : specs) {
    // Kernels tell by its address that an output is there, and a tensor without elements has none.
    const bool is_empty = spec->numel() == 0;
    nb::object tensor;
    void* data = nullptr;
    try {
      tensor = is_empty ? torch.empty(tuple_of({64}), DType::u8, place)
                        : torch.empty(tuple_of(spec->dims), spec->dtype, place);
      data = view_anywhere(tensor, "a result").data;
    } catch (nb::python_error& error) {
      throw_allocation_error(error, spec->bytes(), place);
    }
    nb::object held = is_empty ? tensor.attr("untyped_storage")() : tensor;
    blocks.emplace_back(new Block(data, spec->bytes()),
                        TensorMemory{held.release().ptr(), place, is_empty});
  }
  return blocks;
}

nb::object tensor_of(const std::shared_ptr<Block>& block, const TensorSpec& spec) {
  TensorMemory* const memory = std::get_deleter<TensorMemory>(block);
  if (memory == nullptr) return {};
  nb::object held = nb::borrow(memory->held);
  if (memory->is_storage) {
    nb::object tensor = Torch::instance().empty(tuple_of({0}), spec.dtype, memory->place);
    return tensor.attr("set_")(held, 0, tuple_of(spec.dims), tuple_of(strides_of(spec.dims)));
  }
  // A run that goes on holding the block would hold the tensor, whose gradient function holds the
  // run: nobody would free either. It needs the memory alone.
  if (block.use_count() > 1) {
    memory->held = held.attr("untyped_storage")().release().ptr();
    memory->is_storage = true;
    held.dec_ref();  // the block's
  }
  return held;
}

}  // namespace ortrain::python
