// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ortrain/base/dim.h"
#include "ortrain/base/dtype.h"
#include "ortrain/ir/tensor_data.h"
#include "ortrain/runtime/session.h"
#include "ortrain/training/training_state.h"
#include "python/src/dlpack_abi.h"

namespace ortrain::python {

// A torch tensor seen from here: nothing copied.
struct BorrowedTensor {
  const void* data = nullptr;
  DType dtype = DType::undefined;
  Dims dims;
  nanobind::object keep_alive;  // the tensor whose memory it is
};

// Whether a torch tensor's elements are the negative of what lies in its memory (`z.conj().imag`).
// DLPack says nothing of it.
bool is_negated(nanobind::handle tensor);

// Borrows the memory of a torch tensor; one that is not dense row-major, or is negated, is made so
// first (a copy).
// Through torch's C exchange table where it has one, else through DLPack capsules. Throws
// DeviceError for other devices than `place` and for tensors whose memory is freed, DTypeError for
// types the engine does not hold, each naming `what`.
BorrowedTensor borrow(nanobind::handle tensor, const std::string& what,
                      dlpack::Device place = {dlpack::kCpu, 0});

// Where a torch tensor lies, as it is: nothing copied, nothing kept alive. `dims` and `strides`
// hold as long as the tensor is not changed.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::undefined;
  int rank = 0;
  const int64_t* dims = nullptr;
  const int64_t* strides = nullptr;  // in elements; null for dense row-major
  dlpack::Device place{dlpack::kCpu, 0};
  bool is_negated = false;                    // `view_anywhere` does not ask
  std::shared_ptr<std::vector<int64_t>> own;  // what they point to where torch has no table
};

// Throws DeviceError naming `what` for a tensor with elements and without memory: a storage that
// was freed (`untyped_storage().resize_(0)`, as sharded trainers do) leaves the shape.
void require_memory(const void* data, const int64_t* dims, int rank, const std::string& what);

// Throws UnsupportedError naming `what`: a negated tensor whose memory is to be written to.
[[noreturn]] void refuse_negated(const std::string& what);

// Writes 1 for each byte but 0 and 1 of a dense bool tensor in host memory: PyTorch takes them for
// true, kernels do not.
void make_plain_bools(const TensorView& view);

// Looks at a torch tensor on any device. Throws DTypeError alone.
TensorView view_anywhere(nanobind::handle tensor, const char* what);

// Torch's; null when this torch has none, or one of another major version.
const dlpack::ExchangeTable* exchange_table();

// Python's str(). An attribute is taken as a handle: nb::str(x.attr("y")) would only cast it.
std::string text_of(nanobind::handle object);

// Whether the elements lie without gaps in row-major order.
bool is_row_major(const TensorView& view);

// A torch tensor over the memory of `output`, which it keeps alive; the tensor that the memory came
// from, where it did (torch_blocks.h).
nanobind::object to_torch(const RunOutput& output, dlpack::Device place = {dlpack::kCpu, 0});
// A torch tensor over dense row-major memory, which `owner` keeps alive; null: the caller does.
nanobind::object to_torch(void* data, const TensorSpec& spec, std::shared_ptr<void> owner,
                          dlpack::Device place = {dlpack::kCpu, 0});

// Torch tensors over the memory of each, by name.
nanobind::dict to_torch(const std::map<std::string, MutableTensor>& tensors);

// Copies a numpy array or CPU torch tensor.
TensorData copy_to_tensor_data(nanobind::handle array, const std::string& what);
// Copies the values of a dict of such, by their names.
std::map<std::string, TensorData> copy_to_tensor_data(const nanobind::dict& values);

}  // namespace ortrain::python
