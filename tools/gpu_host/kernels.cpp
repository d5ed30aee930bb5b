// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <elf.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

#include "stand_in.h"

using namespace stand_in;

namespace {

// Limits of sm_90.
constexpr size_t kSharedOfAll = 48 << 10;
constexpr size_t kMostShared = 227 << 10;
constexpr unsigned kMostThreads = 1024;
constexpr int kRegisters = 65536;

template <class T>
T read_at(const char* data, size_t offset) {
  T value;
  std::memcpy(&value, data + offset, sizeof value);
  return value;
}

// Records of a section .nv.info: format, attribute, then a value of 16 bits, or so many bytes.
template <class Use>
void for_each_attribute(const char* data, size_t bytes, const Use& use) {
  constexpr uint8_t kSized = 4;
  for (size_t at = 0; at + 4 <= bytes;) {
    const auto format = read_at<uint8_t>(data, at);
    const auto attribute = read_at<uint8_t>(data, at + 1);
    const size_t size = format == kSized ? read_at<uint16_t>(data, at + 2) : 0;
    if (at + 4 + size > bytes) break;
    use(attribute, data + at + 4, size);
    at += 4 + size;
  }
}

struct Registry {
  std::map<std::string, KernelProperties> properties;  // of the files of ORTRAIN_STAND_IN_CUBINS
  std::map<const void*, std::unique_ptr<Kernel>> by_address;
  std::map<const void*, std::map<std::string, std::unique_ptr<Kernel>>> libraries;
};

Registry& registry() {
  static Registry* const one = [] {
    auto* made = new Registry();
    if (const char* folder = std::getenv("ORTRAIN_STAND_IN_CUBINS")) {
      for (const auto& entry : std::filesystem::directory_iterator(folder)) {
        std::ifstream file(entry.path(), std::ios::binary);
        const std::string text((std::istreambuf_iterator<char>(file)), {});
        for (auto& [name, found] : read_cubin(text.data(), text.size())) {
          made->properties[name] = found;
        }
      }
    }
    return made;
  }();
  return *one;
}

// Without asking for more.
void allow_shared(Kernel& kernel) {
  kernel.most_dynamic_shared =
      static_cast<int>(kSharedOfAll - std::min(kSharedOfAll, kernel.properties.shared));
}

Kernel* kernel_of(const void* function) {
  Registry& r = registry();
  const auto at = r.by_address.find(function);
  if (at != r.by_address.end()) return at->second.get();
  for (const auto& [library, kernels] : r.libraries) {
    for (const auto& [name, kernel] : kernels) {
      if (kernel.get() == function) return kernel.get();
    }
  }
  return nullptr;
}

// What would make the launch fail; empty if nothing.
std::string refusal(const Kernel& kernel, dim3 grid, dim3 block, size_t shared) {
  const auto text = [](auto value) { return std::to_string(value); };
  const unsigned long threads = static_cast<unsigned long>(block.x) * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) return "nothing to launch";
  if (grid.x > 2147483647u || grid.y > 65535 || grid.z > 65535) {
    return "a grid of " + text(grid.x) + " x " + text(grid.y) + " x " + text(grid.z);
  }
  if (threads > kMostThreads || block.z > 64) return text(threads) + " threads";
  const KernelProperties& p = kernel.properties;
  if (p.most_threads > 0 && threads > static_cast<unsigned long>(p.most_threads)) {
    return text(threads) + " threads, bounds of launches say " + text(p.most_threads);
  }
  // Registers are given to warps in units of 256.
  const unsigned long warps = (threads + 31) / 32;
  const unsigned long of_warp = (static_cast<unsigned long>(p.registers) * 32 + 255) / 256 * 256;
  // Each of four parts of a multiprocessor has a quarter of the registers, and of the warps.
  if (of_warp > 0 && warps > kRegisters / 4 / of_warp * 4) {
    return text(threads) + " threads of " + text(p.registers) + " registers";
  }
  if (shared > static_cast<size_t>(kernel.most_dynamic_shared) || shared + p.shared > kMostShared) {
    return text(shared) + " bytes of shared memory beside " + text(p.shared) + ", of at most " +
           text(kernel.most_dynamic_shared);
  }
  return "";
}

cudaError_t launch(const void* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                   cudaStream_t stream, const char* call) {
  const std::lock_guard lock(state_mutex());
  Kernel* const kernel = kernel_of(function);
  if (kernel == nullptr) return result(cudaErrorInvalidDeviceFunction, call);
  if (fails_now(call)) return result(cudaErrorLaunchOutOfResources, call, true);
  if (const std::string why = refusal(*kernel, grid, block, shared); !why.empty()) {
    report("launch", kernel->name + ": " + why);
    return result(cudaErrorInvalidConfiguration, call, true);
  }
  // As they are at the launch: whoever launches may change them as soon as it returns.
  std::vector<std::vector<unsigned char>> values;
  for (size_t i = 0; i < kernel->properties.parameters.size(); ++i) {
    if (arguments[i] == nullptr) {
      report("launch", kernel->name + ": argument " + std::to_string(i) + " of " +
                           std::to_string(kernel->properties.parameters.size()) + " is not there");
      return result(cudaErrorInvalidValue, call, true);
    }
    const auto* from = static_cast<const unsigned char*>(arguments[i]);
    values.emplace_back(from, from + kernel->properties.parameters[i].second);
  }
  count(kernel->properties.known ? "launches" : "launches of others' kernels");
  return submit(stream,
                {kernel->name,
                 [values = std::move(values)](const std::string& how, bool) {
                   for (size_t i = 0; i < values.size(); ++i) {
                     const auto* bytes = reinterpret_cast<const char*>(values[i].data());
                     for (size_t at = 0; at + 8 <= values[i].size(); at += 8) {
                       check_word(read_at<uint64_t>(bytes, at), values[i].size() == 8,
                                  how + ", argument " + std::to_string(i));
                     }
                   }
                 }},
                call);
}

}  // namespace

std::map<std::string, KernelProperties> stand_in::read_cubin(const char* data, size_t bytes) {
  constexpr uint8_t kMaxThreads = 0x05, kParameter = 0x17, kRegisterCount = 0x2f,
                    kParameterOfMany = 0x45;
  std::map<std::string, KernelProperties> found;
  if (bytes < sizeof(Elf64_Ehdr) || std::memcmp(data, ELFMAG, SELFMAG) != 0) return found;
  const auto header = read_at<Elf64_Ehdr>(data, 0);
  const auto section = [&](size_t i) {
    return read_at<Elf64_Shdr>(data, header.e_shoff + i * sizeof(Elf64_Shdr));
  };
  const Elf64_Shdr names = section(header.e_shstrndx);
  Elf64_Shdr symbols = {}, symbol_names = {};
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr each = section(i);
    if (each.sh_type == SHT_SYMTAB) symbols = each, symbol_names = section(each.sh_link);
  }
  const auto symbol = [&](size_t i) -> std::string {
    if ((i + 1) * sizeof(Elf64_Sym) > symbols.sh_size) return "";
    const auto entry = read_at<Elf64_Sym>(data, symbols.sh_offset + i * sizeof(Elf64_Sym));
    return data + symbol_names.sh_offset + entry.st_name;
  };
  for (size_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr each = section(i);
    const std::string name = data + names.sh_offset + each.sh_name;
    if (name == ".nv.info") {
      for_each_attribute(data + each.sh_offset, each.sh_size,
                         [&](uint8_t attribute, const char* value, size_t size) {
                           if (attribute != kRegisterCount || size != 8) return;
                           found[symbol(read_at<uint32_t>(value, 0))].registers =
                               read_at<int32_t>(value, 4);
                         });
    } else if (name.starts_with(".nv.info.")) {
      KernelProperties& kernel = found[name.substr(9)];
      kernel.known = true;
      std::map<uint16_t, std::pair<size_t, size_t>> parameters;
      for_each_attribute(data + each.sh_offset, each.sh_size,
                         [&](uint8_t attribute, const char* value, size_t size) {
                           if (attribute == kMaxThreads && size == 12) {
                             kernel.most_threads = read_at<int32_t>(value, 0) *
                                                   read_at<int32_t>(value, 4) *
                                                   read_at<int32_t>(value, 8);
                           } else if (attribute == kParameter && size == 12) {
                             // index, ordinal, offset; the size is in the upper 14 bits of the last
                             // word
                             parameters[read_at<uint16_t>(value, 4)] = {
                                 read_at<uint16_t>(value, 6), read_at<uint32_t>(value, 8) >> 18};
                           } else if (attribute == kParameterOfMany && size >= 12) {
                             parameters[read_at<uint16_t>(value, 4)] = {
                                 read_at<uint16_t>(value, 6), read_at<uint16_t>(value, 8)};
                           }
                         });
      for (const auto& [ordinal, where] : parameters) kernel.parameters.push_back(where);
    } else if (name.starts_with(".nv.shared.")) {
      if (name.starts_with(".nv.shared.reserved.")) continue;
      // What the system keeps for itself of each block is among it.
      constexpr size_t kReserved = 1024;
      found[name.substr(11)].shared = std::max<size_t>(each.sh_size, kReserved) - kReserved;
    }
  }
  return found;
}

extern "C" {

// --- what the host's part of a compiled file calls

void** __cudaRegisterFatBinary(void* binary) {
  count("files of device code");
  return new void*(binary);
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { delete handle; }
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  const std::lock_guard lock(state_mutex());
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  const auto known = registry().properties.find(name);
  if (known != registry().properties.end()) kernel->properties = known->second;
  allow_shared(*kernel);
  registry().by_address[host] = std::move(kernel);
}

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
static thread_local std::vector<CallConfiguration> configurations;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return result(cudaErrorInvalidConfiguration, "a launch");
  const CallConfiguration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared, stream, "__cudaLaunchKernel");
}

// --- launches

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared, stream, "cudaLaunchKernel");
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block,
                                        void** arguments, size_t shared, cudaStream_t stream) {
  return launch(function, grid, block, arguments, shared, stream, "cudaLaunchCooperativeKernel");
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration, const void* function,
                                void** arguments) {
  return launch(function, configuration->gridDim, configuration->blockDim, arguments,
                configuration->dynamicSmemBytes, configuration->stream, "cudaLaunchKernelExC");
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* given, const void* function) {
  const std::lock_guard lock(state_mutex());
  const Kernel* const kernel = kernel_of(function);
  if (kernel == nullptr) return result(cudaErrorInvalidDeviceFunction, "cudaFuncGetAttributes");
  *given = {};
  given->binaryVersion = given->ptxVersion = 90;
  given->numRegs = kernel->properties.registers;
  given->sharedSizeBytes = kernel->properties.shared;
  given->maxDynamicSharedSizeBytes = kernel->most_dynamic_shared;
  given->maxThreadsPerBlock =
      kernel->properties.most_threads > 0 ? kernel->properties.most_threads : 1024;
  return result(cudaSuccess, "cudaFuncGetAttributes");
}
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  const std::lock_guard lock(state_mutex());
  Kernel* const kernel = kernel_of(function);
  if (kernel == nullptr) return result(cudaErrorInvalidDeviceFunction, "cudaFuncSetAttribute");
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (static_cast<size_t>(value) + kernel->properties.shared > kMostShared) {
      report("launch", kernel->name + " asks for " + std::to_string(value) + " bytes");
      return result(cudaErrorInvalidValue, "cudaFuncSetAttribute", true);
    }
    kernel->most_dynamic_shared = value;
  }
  return result(cudaSuccess, "cudaFuncSetAttribute");
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = 1;
  return result(cudaSuccess, "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags");
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 1;
  return result(cudaSuccess, "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}

// --- code that was compiled in the process

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**,
                                unsigned, cudaLibraryOption*, void**, unsigned) {
  const std::lock_guard lock(state_mutex());
  // Its header says how long it is.
  const auto header = read_at<Elf64_Ehdr>(static_cast<const char*>(code), 0);
  if (std::memcmp(&header, ELFMAG, SELFMAG) != 0) {
    return result(cudaErrorInvalidKernelImage, "cudaLibraryLoadData");
  }
  const size_t bytes = std::max(header.e_shoff + size_t{header.e_shnum} * header.e_shentsize,
                                header.e_phoff + size_t{header.e_phnum} * header.e_phentsize);
  auto* const key = new char();
  auto& kernels = registry().libraries[key];
  for (auto& [name, properties] : read_cubin(static_cast<const char*>(code), bytes)) {
    auto kernel = std::make_unique<Kernel>();
    kernel->name = name;
    kernel->properties = properties;
    allow_shared(*kernel);
    kernels[name] = std::move(kernel);
  }
  count("compiled libraries");
  *library = reinterpret_cast<cudaLibrary_t>(key);
  return result(cudaSuccess, "cudaLibraryLoadData");
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t library, const char* name) {
  const std::lock_guard lock(state_mutex());
  const auto found = registry().libraries.find(library);
  if (found == registry().libraries.end() || !found->second.contains(name)) {
    return result(cudaErrorSymbolNotFound, "cudaLibraryGetKernel");
  }
  *kernel = reinterpret_cast<cudaKernel_t>(found->second.at(name).get());
  return result(cudaSuccess, "cudaLibraryGetKernel");
}
cudaError_t cudaLibraryUnload(cudaLibrary_t library) {
  const std::lock_guard lock(state_mutex());
  registry().libraries.erase(library);
  return result(cudaSuccess, "cudaLibraryUnload");
}

}  // extern "C"
