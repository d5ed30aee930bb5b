// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// The first byte chooses what the rest is:
//   s   a safetensors file
//   c   a folder with a checkpoint: manifest.json, then the two files of tensors
//   C   the same, with digests that fit, so that what lies behind them is reached
//   A   a folder with artifacts: three models, then a checkpoint as for C; a step is trained
// Parts of a folder stand behind their length, four bytes with the lowest first.
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/answers.h"
#include "fuzz/byte_source.h"
#include "fuzz/guarded_memory.h"
#include "fuzz/targets.h"
#include "ortrain/training/artifacts.h"
#include "ortrain/training/checkpoint.h"
#include "ortrain/training/safetensors_file.h"

namespace ortrain::fuzz {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostBytesOfStep = size_t{1} << 20;

// In memory where the system has such a place; removed with the process.
class ScratchFolder {
 public:
  ScratchFolder() {
    const fs::path memory = "/dev/shm";
    const fs::path parent = fs::is_directory(memory) ? memory : fs::temp_directory_path();
    std::string pattern = (parent / "ortrain-fuzz-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw FileError("no folder for files");
    path_ = pattern;
    fs::create_directory(path_ / kCheckpointFolder);
  }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;
  ~ScratchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }

  // An absent part is an absent file.
  void put(const std::string& name, std::optional<std::string_view> content) const {
    if (!content) {
      std::error_code ignored;
      fs::remove(path_ / name, ignored);
      return;
    }
    std::ofstream(path_ / name, std::ios::binary) << *content;
  }
  fs::path operator/(const std::string& name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

const ScratchFolder& scratch() {
  static const ScratchFolder folder;
  return folder;
}

std::string_view as_text(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::optional<std::string_view> next_part(ByteSource& source) {
  if (source.empty()) return std::nullopt;
  return as_text(source.take(source.any<uint32_t>()));
}

void read_safetensors(Bytes bytes) {
  FileHandle handle(::memfd_create("safetensors", MFD_CLOEXEC));
  if (!handle.valid()) return;
  if (::write(handle.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    return;
  }
  accepted([&] {
    const SafetensorsFile file(InputFile(std::move(handle), bytes.size(), "'fuzz'"));
    size_t held = 0;
    for (const auto& [name, entry] : file.entries()) {
      require(entry.spec.bytes() <= bytes.size(), "a tensor is larger than its file");
      held += file.read(entry).spec.bytes();
    }
    require(held <= bytes.size(), "tensors are larger than their file");
    file.digest();
  });
}

// The manifest with digests of the files that are there, where it is an object.
std::string with_digests(std::string_view manifest, const std::optional<std::string_view>& tensors,
                         const std::optional<std::string_view>& optimizer) {
  using Json = nlohmann::json;
  Json json = Json::parse(manifest, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::string(manifest);
  Json& files = json["files"];
  if (!files.is_object()) files = Json::object();
  const auto add = [&](const char* name, const std::optional<std::string_view>& content) {
    if (content) files[name] = {{"size", content->size()}, {"hash", hash_of(*content)}};
  };
  add("parameters.safetensors", tensors);
  add("optimizer.safetensors", optimizer);
  json.erase("digest");
  try {
    json["digest"] = hash_of(json.dump());
    return json.dump(2) + "\n";
  } catch (const Json::exception&) {
    return std::string(manifest);  // text that is no UTF-8
  }
}

void put_checkpoint(ByteSource& source, bool with_fitting_digests) {
  const auto manifest = next_part(source), tensors = next_part(source);
  const auto optimizer = next_part(source);
  const std::string folder = std::string(kCheckpointFolder) + "/";
  std::optional<std::string> sealed;
  if (manifest) {
    sealed = with_fitting_digests ? with_digests(*manifest, tensors, optimizer) : *manifest;
  }
  scratch().put(folder + "manifest.json", sealed);
  scratch().put(folder + "parameters.safetensors", tensors);
  scratch().put(folder + "optimizer.safetensors", optimizer);
}

void read_checkpoint() {
  accepted([] {
    const Checkpoint checkpoint = load_checkpoint(scratch() / kCheckpointFolder);
    TrainingState state;
    restore(state, checkpoint);
    restore(state, checkpoint);
    require(state.tensors.size() == checkpoint.tensors.size(), "restore leaves tensors out");
  });
}

std::vector<InputTensor> user_inputs(const Graph& graph,
                                     std::vector<std::shared_ptr<Block>>& blocks) {
  std::vector<InputTensor> result;
  size_t bytes = 0;
  for (const GraphInput& input : graph.inputs()) {
    if (input.role != InputRole::user) continue;
    TensorSpec spec{graph.value(input.value).dtype, {}};
    for (const Dim& extent : graph.value(input.value).shape) {
      spec.dims.push_back(extent.is_constant() ? extent.constant() : 2);
    }
    check_extents(spec.dims, size_of(spec.dtype));
    bytes += spec.bytes();
    if (bytes > kMostBytesOfStep) throw ShapeError("too large for a test");
    blocks.push_back(exact_block(spec.bytes()));
    std::memset(blocks.back()->data(), 0, spec.bytes());
    result.push_back({std::move(spec), blocks.back()->data()});
  }
  return result;
}

bool is_small(const Graph& graph) {
  // Extents in a file may ask for any amount of memory: that the engine gives it is no mistake.
  for (size_t id = 0; id < graph.num_values(); ++id) {
    int64_t bytes = static_cast<int64_t>(size_of(graph.value(static_cast<ValueId>(id)).dtype));
    for (const Dim& dim : graph.value(static_cast<ValueId>(id)).shape) {
      const int64_t extent = dim.is_constant() ? dim.constant() : 2;
      if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes)) return false;
    }
    if (bytes > static_cast<int64_t>(kMostBytesOfStep)) return false;
  }
  return graph.num_values() < 500;
}

void train_artifacts(ByteSource& source) {
  for (const char* name : {kTrainingModel, kEvaluationModel, kOptimizerModel}) {
    scratch().put(name, next_part(source));
  }
  put_checkpoint(source, /*with_fitting_digests=*/true);
  LoadedArtifacts loaded;
  const bool taken =
      accepted([&] { loaded = load_artifacts(scratch().path(), guarded_kernels()); });
  if (!taken || !is_small(loaded.program->model()) ||
      !is_small(loaded.program->evaluation_model())) {
    return;
  }
  std::vector<std::shared_ptr<Block>> blocks;
  accepted([&] {
    loaded.program->add_gradients(*loaded.state, user_inputs(loaded.program->model(), blocks));
    loaded.program->optimizer_step(*loaded.state);
  });
  accepted([&] {
    loaded.program->evaluate(*loaded.state,
                             user_inputs(loaded.program->evaluation_model(), blocks));
  });
}

}  // namespace

void run_checkpoint(Bytes input) {
  ByteSource source(input);
  switch (source.byte()) {
    case 's':
      return read_safetensors(source.rest());
    case 'c':
      put_checkpoint(source, /*with_fitting_digests=*/false);
      return read_checkpoint();
    case 'C':
      put_checkpoint(source, /*with_fitting_digests=*/true);
      return read_checkpoint();
    case 'A':
      return train_artifacts(source);
    default:
      return;
  }
}

}  // namespace ortrain::fuzz
