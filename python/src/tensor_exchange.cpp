// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/tensor_exchange.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "ortrain/base/error.h"
#include "python/src/device.h"
#include "python/src/dlpack_abi.h"
#include "python/src/torch_blocks.h"

namespace nb = nanobind;

namespace ortrain::python {
namespace {

template <class What>
DType dtype_of(uint8_t code, uint8_t bits, uint16_t lanes, const What& what) {
  using dlpack::TypeCode;
  if (lanes == 1) {
    switch (static_cast<TypeCode>(code)) {
      case TypeCode::floating:
        if (bits == 32) return DType::f32;
        if (bits == 64) return DType::f64;
        if (bits == 16) return DType::f16;
        break;
      case TypeCode::bfloat:
        if (bits == 16) return DType::bf16;
        break;
      case TypeCode::signed_int:
        if (bits == 64) return DType::i64;
        if (bits == 32) return DType::i32;
        if (bits == 16) return DType::i16;
        if (bits == 8) return DType::i8;
        break;
      case TypeCode::unsigned_int:
        if (bits == 64) return DType::u64;
        if (bits == 32) return DType::u32;
        if (bits == 16) return DType::u16;
        if (bits == 8) return DType::u8;
        break;
      case TypeCode::boolean:
        if (bits == 8) return DType::boolean;
        break;
    }
  }
  throw DTypeError(str(what, ": this element type is not supported (DLPack code ",
                       static_cast<int>(code), ", ", static_cast<int>(bits), " bits)"));
}

dlpack::DataType dlpack_type(DType dtype) {
  using dlpack::TypeCode;
  TypeCode code = TypeCode::signed_int;
  if (dtype == DType::bf16) {
    code = TypeCode::bfloat;
  } else if (is_float(dtype)) {
    code = TypeCode::floating;
  } else if (dtype == DType::boolean) {
    code = TypeCode::boolean;
  } else if (!is_signed_integer(dtype)) {
    code = TypeCode::unsigned_int;
  }
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * size_of(dtype)), 1};
}

bool is_dense(const int64_t* shape, const int64_t* strides, int rank) {
  if (strides == nullptr) return true;
  int64_t expected = 1;
  bool empty = false;
  for (int i = 0; i < rank; ++i) empty = empty || shape[i] == 0;
  if (empty) return true;
  for (int i = rank - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

nb::object contiguous(nb::handle tensor, const std::string& what) {
  nb::object made = is_negated(tensor) ? tensor.attr("resolve_neg")() : nb::borrow(tensor);
  if (is_negated(made)) refuse_negated(what);
  return made.attr("contiguous")();
}

// Of a tensor whose memory is there.
size_t count_of(const int64_t* shape, int rank) {
  size_t count = 1;
  for (int i = 0; i < rank; ++i) count *= static_cast<size_t>(shape[i]);
  return count;
}

// PyTorch takes any byte but 0 for true, which it may be given by `view(torch.bool)`; kernels take
// a bool for 0 or 1.
bool has_other_bytes(const void* data, const int64_t* shape, int rank) {
  const size_t count = count_of(shape, rank);
  const auto* bytes = static_cast<const unsigned char*>(data);
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    unsigned char any = 0;
    for (size_t i = begin, end = std::min(count, begin + kBlock); i < end; ++i) any |= bytes[i];
    if (any > 1) return true;
  }
  return false;
}

nb::object with_plain_bools(nb::handle tensor) {
  return tensor.attr("view")(nb::module_::import_("torch").attr("uint8")).attr("ne")(0);
}

[[noreturn]] void refuse_device(const std::string& what, nb::handle tensor,
                                dlpack::Device expected = {dlpack::kCpu, 0}) {
  throw DeviceError(str(what, " is on device '", text_of(tensor.attr("device")), "', expected '",
                        name_of(expected), "'"));
}

// For a Python error that is set.
[[noreturn]] void refuse_unreadable(const std::string& what, nb::handle tensor) {
  nb::python_error error;
  if (nb::hasattr(tensor, "is_cpu") && !nb::cast<bool>(tensor.attr("is_cpu"))) {
    refuse_device(what, tensor);
  }
  throw DTypeError(str(what, " cannot be read: ", error.what()));
}

}  // namespace

void make_plain_bools(const TensorView& view) {
  if (!has_other_bytes(view.data, view.dims, view.rank)) return;
  auto* bytes = static_cast<unsigned char*>(view.data);
  std::transform(bytes, bytes + count_of(view.dims, view.rank), bytes,
                 [](unsigned char byte) { return static_cast<unsigned char>(byte != 0); });
}

void require_memory(const void* data, const int64_t* shape, int rank, const std::string& what) {
  if (data != nullptr || std::find(shape, shape + rank, 0) != shape + rank) return;
  throw DeviceError(str(what, " has no memory: its storage has been freed"));
}

const dlpack::ExchangeTable* exchange_table() {
  // Guarded by the interpreter's lock. The guard of a static initializer would be held while Python
  // runs, and be waited for by threads that hold that lock.
  static const dlpack::ExchangeTable* table = nullptr;
  static bool is_known = false;
  if (is_known) return table;
  const dlpack::ExchangeTable* found = nullptr;
  const nb::object type = nb::module_::import_("torch").attr("Tensor");
  if (nb::hasattr(type, "__dlpack_c_exchange_api__")) {
    nb::object capsule = type.attr("__dlpack_c_exchange_api__");
    found = static_cast<const dlpack::ExchangeTable*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found == nullptr) PyErr_Clear();
    if (found != nullptr && found->header.version.major != dlpack::kMajorVersion) found = nullptr;
  }
  table = found;
  is_known = true;
  return table;
}

std::string text_of(nb::handle object) { return nb::str(object).c_str(); }

bool is_negated(nb::handle tensor) {
  static PyObject* const name = PyUnicode_InternFromString("is_neg");  // never freed
  PyObject* found = PyObject_CallMethodObjArgs(tensor.ptr(), name, nullptr);
  if (found == nullptr) PyErr_Clear();  // of a class that does not take the question
  Py_XDECREF(found);
  return found == Py_True;
}

void refuse_negated(const std::string& what) {
  throw UnsupportedError(str(
      what, " is a view of negated memory (its negative bit is set); call resolve_neg() on it"));
}

TensorView view_anywhere(nb::handle tensor, const char* what) {
  if (const dlpack::ExchangeTable* table = exchange_table()) {
    dlpack::Tensor view{};
    if (table->borrow_from_object(tensor.ptr(), &view) != 0) refuse_unreadable(what, tensor);
    return {.data = static_cast<char*>(view.data) + view.byte_offset,
            .dtype = dtype_of(view.dtype.code, view.dtype.bits, view.dtype.lanes, what),
            .rank = view.ndim,
            .dims = view.shape,
            .strides = view.strides,
            .place = view.device};
  }
  nb::ndarray<> array;
  if (!nb::try_cast(tensor.attr("detach")(), array)) throw DTypeError(str(what, " is no tensor"));
  const auto type = array.dtype();
  const int rank = static_cast<int>(array.ndim());
  auto own = std::make_shared<std::vector<int64_t>>();
  for (int i = 0; i < rank; ++i) own->push_back(static_cast<int64_t>(array.shape(i)));
  for (int i = 0; i < rank; ++i) own->push_back(array.stride(i));
  return {.data = array.data(),
          .dtype = dtype_of(type.code, type.bits, type.lanes, what),
          .rank = rank,
          .dims = own->data(),
          .strides = own->data() + rank,
          .place = {array.device_type(), array.device_id()},
          .own = own};
}

bool is_row_major(const TensorView& view) { return is_dense(view.dims, view.strides, view.rank); }

BorrowedTensor borrow(nb::handle tensor, const std::string& what, dlpack::Device place) {
  if (const dlpack::ExchangeTable* table = exchange_table()) {
    dlpack::Tensor view{};
    if (table->borrow_from_object(tensor.ptr(), &view) != 0) refuse_unreadable(what, tensor);
    if (view.device != place) refuse_device(what, tensor, place);
    const DType dtype = dtype_of(view.dtype.code, view.dtype.bits, view.dtype.lanes, what);
    require_memory(view.data, view.shape, view.ndim, what);
    if (!is_dense(view.shape, view.strides, view.ndim) || is_negated(tensor)) {
      return borrow(contiguous(tensor, what), what, place);
    }
    BorrowedTensor result;
    result.data = static_cast<const char*>(view.data) + view.byte_offset;
    result.dtype = dtype;
    if (dtype == DType::boolean && place.type == dlpack::kCpu &&
        has_other_bytes(result.data, view.shape, view.ndim)) {
      return borrow(with_plain_bools(tensor), what, place);
    }
    result.dims.assign(view.shape, view.shape + view.ndim);
    result.keep_alive = nb::borrow(tensor);
    return result;
  }
  nb::object detached = tensor.attr("detach")();
  nb::ndarray<> array;
  if (!nb::try_cast(detached, array)) throw DTypeError(str(what, " is no tensor"));
  if (dlpack::Device{array.device_type(), array.device_id()} != place) {
    refuse_device(what, tensor, place);
  }
  const auto type = array.dtype();
  const DType dtype = dtype_of(type.code, type.bits, type.lanes, what);
  BorrowedTensor result;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  for (size_t i = 0; i < array.ndim(); ++i) {
    shape.push_back(static_cast<int64_t>(array.shape(i)));
    strides.push_back(array.stride(i));
  }
  require_memory(array.data(), shape.data(), static_cast<int>(shape.size()), what);
  if (!is_dense(shape.data(), strides.data(), static_cast<int>(shape.size())) ||
      is_negated(tensor)) {
    return borrow(contiguous(detached, what), what, place);
  }
  result.data = array.data();
  result.dtype = dtype;
  if (dtype == DType::boolean && place.type == dlpack::kCpu &&
      has_other_bytes(result.data, shape.data(), static_cast<int>(shape.size()))) {
    return borrow(with_plain_bools(detached), what, place);
  }
  result.dims = std::move(shape);
  result.keep_alive = nb::borrow(tensor);
  return result;
}

namespace {

// What a tensor made here owns until its consumer calls the deleter.
struct Owner {
  dlpack::ManagedTensor managed{};
  std::shared_ptr<void> memory;
  Dims dims;
  Dims strides;
  bool is_handed_over = false;  // before, the deleter deletes nothing
};

}  // namespace

nb::object to_torch(const RunOutput& output, dlpack::Device place) {
  if (nb::object own = tensor_of(output.block, output.spec); own.is_valid()) return own;
  return to_torch(output.block->data(), output.spec, output.block, place);
}

nb::object to_torch(void* data, const TensorSpec& spec, std::shared_ptr<void> memory,
                    dlpack::Device place) {
  if (const dlpack::ExchangeTable* table = exchange_table()) {
    auto owner = std::make_unique<Owner>();
    owner->memory = std::move(memory);
    owner->dims = spec.dims;
    owner->strides = strides_of(owner->dims);
    owner->managed.version = {dlpack::kMajorVersion, 0};
    owner->managed.manager_ctx = owner.get();
    // torch calls it in some of its failures, and not in others.
    owner->managed.deleter = [](dlpack::ManagedTensor* self) {
      auto* held = static_cast<Owner*>(self->manager_ctx);
      if (held->is_handed_over) delete held;
    };
    owner->managed.tensor = {.data = data,
                             .device = place,
                             .ndim = static_cast<int32_t>(owner->dims.size()),
                             .dtype = dlpack_type(spec.dtype),
                             .shape = owner->dims.data(),
                             .strides = owner->strides.data(),
                             .byte_offset = 0};
    void* object = nullptr;
    if (table->object_from_managed(&owner->managed, &object) != 0) {
      const nb::python_error reason;  // extents of an empty tensor whose product leaves int64
      const std::string text = text_of(reason.value());
      throw ShapeError(str("torch does not take a result of shape ", dims_str(spec.dims), ": ",
                           text.substr(0, text.find('\n'))));
    }
    owner.release()->is_handed_over = true;  // the tensor deletes it
    return nb::steal(static_cast<PyObject*>(object));
  }
  auto* held = new std::shared_ptr<void>(std::move(memory));
  nb::capsule keeper(held, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
  const dlpack::DataType type = dlpack_type(spec.dtype);
  std::vector<size_t> shape(spec.dims.begin(), spec.dims.end());
  nb::ndarray<nb::pytorch> array(data, shape.size(), shape.data(), keeper, nullptr,
                                 nb::dlpack::dtype{type.code, type.bits, type.lanes}, place.type,
                                 place.id);
  return nb::cast(array);
}

TensorData copy_to_tensor_data(nb::handle array, const std::string& what) {
  nb::object source = nb::borrow(array);
  if (nb::hasattr(source, "detach")) source = source.attr("detach")().attr("cpu")();
  if (nb::hasattr(source, "resolve_neg")) source = source.attr("resolve_neg")();
  nb::ndarray<nb::c_contig, nb::ro> view;
  if (!nb::try_cast(source, view)) throw DTypeError(str(what, " is no array or tensor"));
  if (view.device_type() != nb::device::cpu::value) refuse_device(what, array);
  const DType dtype = dtype_of(view.dtype().code, view.dtype().bits, view.dtype().lanes, what);
  Dims dims;
  for (size_t i = 0; i < view.ndim(); ++i) dims.push_back(static_cast<int64_t>(view.shape(i)));
  void* destination = nullptr;
  TensorData result = TensorData::allocate(dtype, std::move(dims), &destination);
  if (result.bytes() > 0) std::memcpy(destination, view.data(), result.bytes());
  return result;
}

nb::dict to_torch(const std::map<std::string, MutableTensor>& tensors) {
  nb::dict result;
  for (const auto& [name, tensor] : tensors) {
    result[name.c_str()] =
        to_torch(tensor.data, tensor.spec, tensor.owner, place_of(tensor.device));
  }
  return result;
}

std::map<std::string, TensorData> copy_to_tensor_data(const nb::dict& values) {
  std::map<std::string, TensorData> result;
  for (auto [key, value] : values) {
    const std::string name = nb::cast<std::string>(key);
    result.emplace(name, copy_to_tensor_data(value, str("the value of '", name, "'")));
  }
  return result;
}

}  // namespace ortrain::python
