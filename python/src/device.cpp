// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/device.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "ortrain/base/error.h"
#include "python/src/init.h"
#include "python/src/tensor_exchange.h"
#include "python/src/torch_blocks.h"

#if defined(ORTRAIN_HAVE_GPU)
#include "ortrain/gpu/cudnn.h"
#include "ortrain/gpu/gemm.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/library_folders.h"
#endif
#if defined(ORTRAIN_GPU_IS_SIMULATED)
#include "ortrain/gpu/simulated_device.h"
#endif

namespace nb = nanobind;

namespace ortrain::python {
namespace {

std::string platform() {
#if defined(ORTRAIN_HAVE_GPU)
  return std::string(gpu::platform());
#else
  return "none";
#endif
}

#if defined(ORTRAIN_HAVE_GPU)

void set_message(void* context, const char* kind, const char* message) {
  *static_cast<std::string*>(context) = str(kind, ": ", message);
}

// Memory of PyTorch's caching allocator, on the calling thread's current stream.
std::shared_ptr<Block> allocate_by_table(const dlpack::ExchangeTable& table, dlpack::Device place,
                                         size_t bytes) {
  int64_t extent = static_cast<int64_t>(bytes);
  dlpack::Tensor prototype{.data = nullptr,
                           .device = place,
                           .ndim = 1,
                           .dtype = {static_cast<uint8_t>(dlpack::TypeCode::unsigned_int), 8, 1},
                           .shape = &extent,
                           .strides = nullptr,
                           .byte_offset = 0};
  dlpack::ManagedTensor* made = nullptr;
  std::string message;
  if (table.allocate(&prototype, &made, &message, &set_message) != 0 || made == nullptr) {
    throw OutOfMemoryError(str("PyTorch has no ", bytes, " bytes on ", name_of(place), ": ",
                               message.substr(0, message.find('\n'))));
  }
  void* const data = static_cast<char*>(made->tensor.data) + made->tensor.byte_offset;
  return {new Block(data, bytes), [made](Block* block) {
            made->deleter(made);
            delete block;
          }};
}

std::shared_ptr<Block> allocate_by_python(dlpack::Device place, size_t bytes) {
  nb::gil_scoped_acquire lock;
  const nb::module_ torch = nb::module_::import_("torch");
  nb::object tensor;
  try {
    tensor = torch.attr("empty")(bytes, nb::arg("dtype") = torch.attr("uint8"),
                                 nb::arg("device") = name_of(place));
  } catch (nb::python_error& error) {
    throw OutOfMemoryError(
        str("PyTorch has no ", bytes, " bytes on ", name_of(place), ": ", error.what()));
  }
  void* const data = reinterpret_cast<void*>(nb::cast<uintptr_t>(tensor.attr("data_ptr")()));
  return {new Block(data, bytes), [held = tensor.release().ptr()](Block* block) {
            nb::gil_scoped_acquire relock;
            Py_DECREF(held);
            delete block;
          }};
}

int32_t dlpack_type_of_gpu() {
  if (gpu::platform() == "cuda") return dlpack::kCuda;
  return gpu::platform() == "hip" ? dlpack::kRocm : dlpack::kCpu;
}

// Freed blocks by size. In a steady loop PyTorch's allocator hands out the same addresses on a
// device; on the CPU, for the simulator, it is malloc, which does not.
class FreedBlocks {
 public:
  template <class Allocate>
  std::shared_ptr<Block> take(size_t bytes, const Allocate& allocate) {
    std::shared_ptr<Block> block;
    {
      const std::lock_guard lock(mutex_);
      std::vector<std::shared_ptr<Block>>& freed = by_size_[bytes];
      if (!freed.empty()) {
        block = std::move(freed.back());
        freed.pop_back();
      }
    }
    if (block == nullptr) block = allocate();
    Block* const address = block.get();
    return {address, [this, block = std::move(block)](Block*) mutable { keep(std::move(block)); }};
  }

 private:
  static constexpr size_t kMostKept = 16;  // of one size

  void keep(std::shared_ptr<Block> block) {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Block>>& freed = by_size_[block->bytes()];
    if (freed.size() < kMostKept) freed.push_back(std::move(block));
  }

  std::mutex mutex_;
  std::map<size_t, std::vector<std::shared_ptr<Block>>> by_size_;
};

// `torch_results`: results are tensors of PyTorch's own. A GPU's are; the simulator's in tests
// alone, since the memory of the CPU that they come from is not where it was in the step before, so
// that nothing is recorded.
void set_allocators(const dlpack::ExchangeTable* table, bool torch_results) {
  const int32_t type = dlpack_type_of_gpu();
  gpu::Allocator allocate = [table, type](int index, size_t bytes, void*) {
    const dlpack::Device place{type, index};
    return table != nullptr ? allocate_by_table(*table, place, bytes)
                            : allocate_by_python(place, bytes);
  };
  if (gpu::platform() == "simulator") {
    static auto* const freed = new FreedBlocks();  // tensors may outlive static destruction
    allocate = [allocate](int index, size_t bytes, void* stream) {
      return freed->take(bytes, [&] { return allocate(index, bytes, stream); });
    };
  }
  gpu::ResultAllocator results;
  if (torch_results) {
    results = [type](int index, std::span<const TensorSpec* const> specs, void*) {
      return torch_blocks({type, index}, specs);
    };
  }
  gpu::set_allocator(std::move(allocate), std::move(results));
}

// Of the vendor's libraries among Python's packages: <site-packages>/nvidia/*/lib.
std::vector<std::string> library_folders() {
  std::vector<std::string> folders;
  const nb::object spec =
      nb::module_::import_("importlib.util").attr("find_spec")(nb::str("nvidia"));
  if (spec.is_none() || spec.attr("submodule_search_locations").is_none()) return folders;
  for (nb::handle place : spec.attr("submodule_search_locations")) {
    std::error_code unreadable;
    for (const auto& package :
         std::filesystem::directory_iterator(nb::cast<std::string>(place), unreadable)) {
      const std::filesystem::path folder = std::filesystem::absolute(package.path() / "lib");
      if (std::filesystem::is_directory(folder, unreadable)) folders.push_back(folder.string());
    }
  }
  std::ranges::sort(folders);
  return folders;
}

void install_allocator() {
  static std::once_flag once;
  std::call_once(once, [table = exchange_table()] {
    set_allocators(table, gpu::platform() != "simulator");
    if (gpu::platform() == "cuda") gpu::set_library_folders(library_folders());
  });
}

#endif

}  // namespace

dlpack::Device place_of([[maybe_unused]] const Device* device) {
#if defined(ORTRAIN_HAVE_GPU)
  if (device != nullptr && !device->is_host()) return {dlpack_type_of_gpu(), device->index()};
#endif
  return {dlpack::kCpu, 0};
}

std::string name_of(dlpack::Device place) {
  if (place.type == dlpack::kCpu) return "cpu";
  // PyTorch calls AMD's devices cuda too.
  if (place.type == dlpack::kCuda || place.type == dlpack::kRocm) return str("cuda:", place.id);
  return str("device ", place.id, " of DLPack type ", place.type);
}

NamedDevice find_device(const std::string& name) {
  if (name == "cpu") return {name, &cpu_kernels()};
#if defined(ORTRAIN_HAVE_GPU)
  const bool simulated = gpu::platform() == "simulator";
  if (simulated ? name == "simulator" : name.starts_with("cuda:")) {
    int index = 0;
    if (!simulated) {
      const std::string digits = name.substr(5);
      if (digits.empty() || digits.size() > 4 ||
          digits.find_first_not_of("0123456789") != std::string::npos) {
        throw DeviceError(str("'", name, "' is no device"));
      }
      index = std::stoi(digits);
    }
    install_allocator();
    return {name, &gpu::kernels(index), {dlpack_type_of_gpu(), index}};
  }
#endif
  throw DeviceError(str("there is no provider for device '", name,
                        "': this build has the CPU's and for GPUs '", platform(), "'"));
}

void* current_stream(dlpack::Device place) {
  if (place.type == dlpack::kCpu) return nullptr;
  if (const dlpack::ExchangeTable* table = exchange_table()) {
    void* stream = nullptr;
    if (table->current_work_stream(place.type, place.id, &stream) == 0) return stream;
    PyErr_Clear();
  }
  const nb::object stream =
      nb::module_::import_("torch").attr("cuda").attr("current_stream")(place.id);
  return reinterpret_cast<void*>(nb::cast<uintptr_t>(stream.attr("cuda_stream")));
}

void init_device(nb::module_& module) {
  // Whether matrix products and convolutions of float32 on a GPU may round their factors to TF32,
  // in plans made from now on.
  module.def(
      "set_allow_tf32",
      []([[maybe_unused]] bool products, [[maybe_unused]] bool convolutions) {
#if defined(ORTRAIN_HAVE_GPU)
        gpu::set_allow_tf32(products);
        gpu::set_allow_tf32_convolutions(convolutions);
#endif
      },
      nb::arg("products"), nb::arg("convolutions"));
#if defined(ORTRAIN_GPU_IS_SIMULATED)
  // For tests: whether the simulator gives results as a GPU does (above), and whether it runs
  // behind the host, which finds no fault then.
  module.def(
      "simulate_torch_results",
      [](bool on) {
        install_allocator();
        set_allocators(exchange_table(), on);
      },
      nb::arg("on"));
  module.def("simulate_lag", &gpu::simulator::fall_behind, nb::arg("on"));
#endif
  // "none", "simulator", "cuda" or "hip".
  module.def("gpu_platform", &platform);
  module.def("gpu_count", [] {
#if defined(ORTRAIN_HAVE_GPU)
    return gpu::device_count();
#else
    return 0;
#endif
  });
}

}  // namespace ortrain::python
