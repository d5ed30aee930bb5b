// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/ir/confined_file.h"
#include "ortrain/training/safetensors_file.h"
#include "ortrain/training/training_options.h"

namespace ortrain {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kManifest = "manifest.json";
constexpr const char* kParameters = "parameters.safetensors";
constexpr const char* kOptimizer = "optimizer.safetensors";
constexpr const char* kFormat = "ortrain checkpoint";
constexpr int64_t kVersion = 1;
constexpr std::string_view kPrefix = "checkpoint-";
constexpr std::string_view kUnfinished = ".saving-";
constexpr uint64_t kMostNumber = 1'000'000'000'000'000;
constexpr uint64_t kMaxManifest = uint64_t{64} << 20;
// The names are ours, and backups link what has not changed.
constexpr bool kAllowLinks = true;

[[noreturn]] void fail(const std::string& what, const fs::path& path, const std::error_code& code) {
  throw FileError(str("cannot ", what, " '", path.string(), "': ", code.message()));
}

void flush_folder(const fs::path& path) {
  const FileHandle handle(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!handle.valid() || ::fsync(handle.get()) != 0) {
    fail("flush the folder", path, {errno, std::generic_category()});
  }
}

// --- numbers as the manifest has them: floats keep their bits

Json float_to_json(double value) {
  char text[64];
  const auto result = std::to_chars(text, text + sizeof(text), value, std::chars_format::hex);
  return {{"float", std::string(text, result.ptr)}};
}

double float_from_json(const Json& value, const std::string& name) {
  const auto found = value.is_object() ? value.find("float") : value.end();
  if (!value.is_object() || found == value.end() || !found->is_string()) {
    throw InvalidModelError(str("'", name, "' is no float"));
  }
  const std::string& text = found->get_ref<const std::string&>();
  double result = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), result, std::chars_format::hex);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw InvalidModelError(str("'", name, "' is no float"));
  }
  return result;
}

const Json& member(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) throw InvalidModelError(str("'", name, "' is missing"));
  return *found;
}

template <class T>
T integer_of(const Json& value, const std::string& name) {
  if (!value.is_number_integer()) throw InvalidModelError(str("'", name, "' is no integer"));
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (std::in_range<T>(number)) return static_cast<T>(number);
  } else {
    const auto number = value.get<int64_t>();
    if (std::in_range<T>(number)) return static_cast<T>(number);
  }
  throw InvalidModelError(str("'", name, "' is ", value.dump(), ", which is out of range"));
}

template <class T>
T integer(const Json& object, const char* name) {
  return integer_of<T>(member(object, name), name);
}

// Of something counted one by one: further than any program gets, and far from the end of int64.
int64_t count(const Json& object, const char* name) {
  const int64_t number = integer<int64_t>(object, name);
  if (number >= 0 && number <= int64_t{1} << 53) return number;
  throw InvalidModelError(str("'", name, "' is ", number, ", which is out of range"));
}

// A rate or a scale.
double finite(const Json& object, const char* name) {
  const double number = float_from_json(member(object, name), name);
  if (std::isfinite(number) && number >= 0) return number;
  throw InvalidModelError(str("'", name, "' is ", number, ", which is out of range"));
}

Json property_to_json(const CheckpointProperty& property) {
  if (const auto* number = std::get_if<double>(&property)) return float_to_json(*number);
  if (const auto* number = std::get_if<int64_t>(&property)) return *number;
  return std::get<std::string>(property);
}

CheckpointProperty property_from_json(const Json& value, const std::string& name) {
  if (value.is_number_integer()) return integer_of<int64_t>(value, name);
  if (value.is_string()) return value.get<std::string>();
  return float_from_json(value, name);
}

// The text of a manifest that has no digest yet, with it.
std::string sealed(Json manifest) {
  try {
    manifest["digest"] = hash_of(manifest.dump());
    return manifest.dump(2) + "\n";
  } catch (const Json::type_error&) {
    throw InvalidModelError("a property, or the name of a tensor, is no UTF-8 text");
  }
}

Json unsealed(const std::string& text) {
  Json manifest = parse_flat_json(text);
  if (!manifest.is_object()) throw InvalidModelError("the manifest is no JSON object");
  const auto digest = manifest.find("digest");
  if (digest == manifest.end() || !digest->is_string()) {
    throw InvalidModelError("the manifest has no digest");
  }
  manifest.erase(digest);
  if (sealed(manifest) != text) throw InvalidModelError("the manifest is damaged");
  return manifest;
}

// --- folders

std::optional<uint64_t> number_of(const std::string& name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  uint64_t number = 0;
  const char* const begin = name.data() + kPrefix.size();
  const auto [end, error] = std::from_chars(begin, name.data() + name.size(), number);
  if (error != std::errc() || end != name.data() + name.size()) return std::nullopt;
  // Others may use the name, with any number: one more has to be a number as well.
  if (number > kMostNumber) return std::nullopt;
  return number;
}

// The checkpoints of a folder, newest first.
std::vector<std::pair<uint64_t, fs::path>> checkpoints_in(const fs::path& folder) {
  std::vector<std::pair<uint64_t, fs::path>> found;
  std::error_code code;
  for (fs::directory_iterator it(folder, code), end; !code && it != end; it.increment(code)) {
    if (const auto number = number_of(it->path().filename().string())) {
      found.emplace_back(*number, it->path());
    }
  }
  if (code) fail("read the folder", folder, code);
  std::ranges::sort(found, std::greater<>());
  return found;
}

// Whether a folder holds files of a checkpoint of ours, whole or not: other programs use the name
// too.
bool looks_like_ours(const fs::path& path) {
  std::error_code code;
  return fs::exists(path / kManifest, code) || fs::exists(path / kParameters, code);
}

// Whether its manifest says that it is ours: nothing else is removed.
bool is_ours(const fs::path& path) {
  try {
    const InputFile file = ConfinedDirectory(path).open(kManifest, kAllowLinks);
    std::string text(std::min<uint64_t>(file.size(), 4096), '\0');
    file.read(0, text.data(), text.size());
    return text.find(str('"', kFormat, '"')) != std::string::npos;
  } catch (const Error&) {
    return false;  // no file, or one that is none: a pipe, a socket, a folder
  }
}

// The process that holds a lock on an open file, by /proc/locks; "" where that does not tell.
std::string holder_of_lock(int file) {
  struct stat status;
  if (::fstat(file, &status) != 0) return "";
  std::ifstream locks("/proc/locks");
  // number: FLOCK ADVISORY WRITE process major:minor:inode begin end
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    std::string number, kind, mode, access, process, place;
    if (!(fields >> number >> kind >> mode >> access >> process >> place)) continue;
    const size_t inode = place.rfind(':');
    if (kind != "FLOCK" || inode == std::string::npos) continue;
    if (place.substr(inode + 1) == std::to_string(status.st_ino)) return "process " + process;
  }
  return "";
}

// One saver at a time in a folder, of all threads and processes. Given back explicitly: a process
// that was forked meanwhile has a copy of the descriptor.
class FolderLock {
 public:
  FolderLock(const fs::path& folder, std::chrono::milliseconds patience)
      : handle_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    if (!handle_.valid()) fail("lock the folder", folder, {errno, std::generic_category()});
    const auto begin = std::chrono::steady_clock::now();
    bool told = false;
    while (::flock(handle_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) fail("lock the folder", folder, {errno, std::generic_category()});
      const auto waited = std::chrono::steady_clock::now() - begin;
      if (!told && waited > kTellsAfter) {
        told = true;
        log_line("checkpoint",
                 str("waiting for ", holder(), " to save into '", folder.string(), "'"));
      }
      if (waited > patience) {
        throw FileError(str("'", folder.string(), "' has been locked for ",
                            std::chrono::duration_cast<std::chrono::seconds>(waited).count(),
                            " s by ", holder(), ", which saves there or was stopped while it did"));
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock() { ::flock(handle_.get(), LOCK_UN); }

 private:
  static constexpr std::chrono::seconds kTellsAfter{5};

  std::string holder() const {
    const std::string found = holder_of_lock(handle_.get());
    return found.empty() ? "another process" : found;
  }

  FileHandle handle_;
};

// A folder that is being filled, removed unless it gets its name. Made under the lock.
class UnfinishedFolder {
 public:
  explicit UnfinishedFolder(const fs::path& parent) : path_(parent / str(kUnfinished, ::getpid())) {
    std::error_code code;
    if (!fs::create_directory(path_, code)) fail("create the folder", path_, code);
  }
  UnfinishedFolder(const UnfinishedFolder&) = delete;
  UnfinishedFolder& operator=(const UnfinishedFolder&) = delete;
  ~UnfinishedFolder() {
    std::error_code ignored;  // what stays is removed by a later save
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }

  const fs::path& path() const { return path_; }

  void rename_to(const fs::path& name) {
    std::error_code code;
    fs::rename(path_, name, code);
    if (code) fail("rename a folder to", name, code);
    path_.clear();
  }

  // Under the lock: nobody fills them any more.
  static void remove_abandoned(const fs::path& parent) {
    std::error_code code;
    std::vector<fs::path> abandoned;
    for (fs::directory_iterator it(parent, code), end; !code && it != end; it.increment(code)) {
      if (it->path().filename().string().starts_with(kUnfinished)) abandoned.push_back(it->path());
    }
    for (const fs::path& path : abandoned) fs::remove_all(path, code);
  }

 private:
  fs::path path_;
};

// It loses its name first: what is left of it, if the process ends here, is removed by a later
// save.
void remove_checkpoint(const fs::path& path) {
  const fs::path aside =
      path.parent_path() / str(kUnfinished, "removed-", path.filename().string());
  std::error_code code;  // what cannot be removed does no harm
  fs::rename(path, aside, code);
  fs::remove_all(code ? path : aside, code);
}

Json digest_to_json(const FileDigest& digest) {
  return {{"size", digest.size}, {"hash", digest.hash}};
}

std::map<std::string, MutableTensor> read_tensors(const ConfinedDirectory& directory,
                                                  const std::string& name, const Json& files) {
  const SafetensorsFile file =
      with_context(name + ": ", [&] { return SafetensorsFile(directory.open(name, kAllowLinks)); });
  if (digest_to_json(file.digest()) != member(files, name.c_str())) {
    throw InvalidModelError(str(name, " is damaged"));
  }
  std::map<std::string, MutableTensor> tensors;
  for (const auto& [tensor, entry] : file.entries()) tensors.emplace(tensor, file.read(entry));
  return tensors;
}

Checkpoint read_checkpoint(const fs::path& path) {
  const ConfinedDirectory directory(path);
  const InputFile file = directory.open(kManifest, kAllowLinks);
  if (file.size() > kMaxManifest) throw InvalidModelError("the manifest is too long");
  std::string text(file.size(), '\0');
  file.read(0, text.data(), text.size());
  const Json manifest = unsealed(text);
  if (member(manifest, "format") != kFormat) throw InvalidModelError("it is of another format");
  if (integer<int64_t>(manifest, "version") != kVersion) {
    throw UnsupportedError(str("it is of version ", integer<int64_t>(manifest, "version"),
                               ", this program reads ", kVersion));
  }
  Checkpoint checkpoint;
  checkpoint.path = path;
  checkpoint.steps = count(manifest, "steps");
  checkpoint.kept_batches = count(manifest, "kept_batches");
  if (manifest.contains("updates")) {
    const Json& updates = manifest["updates"];
    if (!updates.is_object()) throw InvalidModelError("'updates' is no object");
    for (const auto& [parameter, value] : updates.items()) {
      const int64_t number = count(updates, parameter.c_str());
      if (number > checkpoint.steps) {
        throw InvalidModelError(
            str("'", parameter, "' has had ", number, " updates in ", checkpoint.steps, " steps"));
      }
      checkpoint.updates[parameter] = number;
    }
  }
  checkpoint.seed = integer<uint64_t>(manifest, "seed");
  checkpoint.runs = integer<uint64_t>(manifest, "runs");
  checkpoint.learning_rate = finite(manifest, "learning_rate");
  checkpoint.loss_scale = finite(manifest, "loss_scale");
  for (const auto& [name, value] : member(manifest, "properties").items()) {
    checkpoint.properties[name] = property_from_json(value, name);
  }
  const Json& files = member(manifest, "files");
  checkpoint.tensors = read_tensors(directory, kParameters, files);
  checkpoint.has_optimizer = files.contains(kOptimizer);
  if (checkpoint.has_optimizer) {
    checkpoint.optimizer = read_tensors(directory, kOptimizer, files);
  }
  return checkpoint;
}

void require_same(const std::string& name, const TensorSpec& given, const TensorSpec& expected) {
  if (given != expected) {
    throw InvalidModelError(str("the checkpoint has '", name, "' as ", tensor_spec_str(given),
                                ", the model as ", tensor_spec_str(expected)));
  }
}

}  // namespace

fs::path save_checkpoint(const fs::path& folder, TrainingState& state,
                         const CheckpointProperties& properties, const CheckpointOptions& options) {
  check(options.keep > 0, "a folder keeps at least one checkpoint");
  {
    const std::shared_ptr<void> scope = state.device->enter();
    state.device->synchronize_all();
    state.device->raise_faults();
    state.settle();
  }
  std::error_code code;
  fs::create_directories(folder, code);
  if (code) fail("create the folder", folder, code);
  if (fs::exists(folder / kManifest, code)) {
    throw FileError(
        str("'", folder.string(), "' is a checkpoint itself; give the folder that it lies in"));
  }
  const FolderLock lock(folder, options.patience);
  UnfinishedFolder::remove_abandoned(folder);

  Json manifest = {{"format", kFormat},
                   {"version", kVersion},
                   {"steps", state.steps},
                   {"kept_batches", options.optimizer ? state.kept_batches : 0},
                   {"seed", state.seed},
                   {"runs", state.runs},
                   {"learning_rate", float_to_json(state.learning_rate)},
                   {"loss_scale", float_to_json(state.loss_scale)}};
  if (options.optimizer) {
    // Of the others there are as many as steps.
    for (const auto& [parameter, number] : state.updates()) {
      if (number != state.steps) manifest["updates"][parameter] = number;
    }
  }
  manifest["properties"] = Json::object();
  for (const auto& [name, value] : properties) {
    manifest["properties"][name] = property_to_json(value);
  }
  UnfinishedFolder unfinished(folder);
  manifest["files"][kParameters] =
      digest_to_json(write_safetensors(unfinished.path(), kParameters, state.tensors));
  if (options.optimizer) {
    std::map<std::string, MutableTensor> kept = state.optimizer;
    if (state.kept_batches == 0) {
      const std::string suffix = state_target("", kAccumulatedGradient);
      std::erase_if(kept, [&](const auto& entry) { return entry.first.ends_with(suffix); });
    }
    manifest["files"][kOptimizer] =
        digest_to_json(write_safetensors(unfinished.path(), kOptimizer, kept));
  }
  OutputFile file(unfinished.path(), kManifest);
  const std::string text = sealed(std::move(manifest));
  file.write(text.data(), text.size());
  file.commit();

  const std::vector<std::pair<uint64_t, fs::path>> others = checkpoints_in(folder);
  std::string digits = std::to_string(others.empty() ? 1 : others.front().first + 1);
  digits.insert(0, digits.size() < 8 ? 8 - digits.size() : 0, '0');
  fs::path path = folder / (std::string(kPrefix) + digits);
  unfinished.rename_to(path);
  flush_folder(folder);
  size_t kept = 1;
  for (const auto& [number, other] : others) {
    if (is_ours(other) && ++kept > options.keep) remove_checkpoint(other);
  }
  return path;
}

Checkpoint load_checkpoint(const fs::path& folder) {
  std::error_code code;
  if (!fs::is_directory(folder, code)) {
    throw FileError(str("there is no folder '", folder.string(), "' with checkpoints"));
  }
  std::vector<std::pair<uint64_t, fs::path>> candidates;
  if (fs::exists(folder / kManifest, code)) {
    candidates.emplace_back(0, folder);
  } else {
    candidates = checkpoints_in(folder);
    std::erase_if(candidates, [](const auto& entry) { return !looks_like_ours(entry.second); });
    if (candidates.empty() && looks_like_ours(folder)) candidates.emplace_back(0, folder);
  }
  std::vector<std::string> passed_over;
  for (const auto& [number, path] : candidates) {
    try {
      Checkpoint checkpoint = read_checkpoint(path);
      checkpoint.passed_over = std::move(passed_over);
      return checkpoint;
    } catch (const OutOfMemoryError&) {
      throw;  // that says nothing about the checkpoint
    } catch (const Error& error) {
      passed_over.push_back(str("'", path.string(), "': ", error.what()));
    }
  }
  std::string message = str("'", folder.string(), "' holds no complete checkpoint");
  for (const std::string& reason : passed_over) message += "; " + reason;
  throw FileError(message);
}

void restore(TrainingState& state, const Checkpoint& checkpoint, bool strict) {
  for (const auto& [name, tensor] : checkpoint.tensors) {
    const auto found = state.tensors.find(name);
    if (found != state.tensors.end()) {
      require_same(name, tensor.spec, found->second.spec);
    } else if (strict && !state.tensors.empty()) {
      throw InvalidModelError(str("the checkpoint has '", name, "', the model does not"));
    }
  }
  for (const auto& [name, tensor] : state.tensors) {
    if (strict && !checkpoint.tensors.contains(name)) {
      throw InvalidModelError(str("the model has '", name, "', the checkpoint does not"));
    }
  }
  for (const auto& [name, tensor] : checkpoint.optimizer) {
    const auto found = state.optimizer.find(name);
    if (found != state.optimizer.end()) require_same(name, tensor.spec, found->second.spec);
    const auto parameter = state.tensors.find(name.substr(0, name.rfind(':')));
    if (parameter != state.tensors.end() && parameter->second.spec.dims != tensor.spec.dims) {
      throw InvalidModelError(str("the checkpoint has '", name, "' as ",
                                  tensor_spec_str(tensor.spec), ", the parameter is ",
                                  tensor_spec_str(parameter->second.spec)));
    }
  }

  if (state.tensors.empty()) {
    for (const auto& [name, tensor] : checkpoint.tensors) {
      state.tensors.emplace(name, tensor.clone(*state.device));
    }
  } else {
    for (const auto& [name, tensor] : checkpoint.tensors) {
      const auto found = state.tensors.find(name);
      if (found == state.tensors.end() || tensor.spec.bytes() == 0) continue;
      found->second.assign(tensor);
    }
  }
  state.settle_now();
  // Without its states an optimizer starts anew.
  state.optimizer.clear();
  state.kept_batches = 0;
  state.kept_parameters.clear();
  state.steps = 0;
  state.set_updates(checkpoint.has_optimizer ? checkpoint.updates
                                             : std::map<std::string, int64_t>());
  if (checkpoint.has_optimizer) {
    for (const auto& [name, tensor] : checkpoint.optimizer) {
      state.optimizer.emplace(name, tensor.clone(*state.device));
    }
    state.kept_batches = checkpoint.kept_batches;
    state.steps = checkpoint.steps;
  }
  state.learning_rate = checkpoint.learning_rate;
  state.loss_scale = checkpoint.loss_scale;
  state.seed = checkpoint.seed;
  state.runs = checkpoint.runs;
}

}  // namespace ortrain
