// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/extension/load_extension.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <set>

#include "ortrain/base/error.h"
#include "ortrain/base/log.h"
#include "ortrain/extension/host.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/runtime/kernel_registry.h"

namespace ortrain {
namespace {

std::string full_name(const OpDef& def) { return str(def.domain, "::", def.name); }

// All checks come before the first change.
std::vector<std::string> add_all(std::vector<OrtrainRegistrar::Entry> entries) {
  std::set<std::string> names;
  for (const OrtrainRegistrar::Entry& entry : entries) {
    const std::string name = full_name(entry.def);
    if (!names.insert(name).second || op_registry().find(entry.def.domain, entry.def.name)) {
      throw InvalidModelError(str("operator ", name, " is defined already"));
    }
  }
  if (entries.empty()) throw InvalidModelError("the library defines no operators");
  for (OrtrainRegistrar::Entry& entry : entries) {
    // The kernels first: whoever finds the operator finds them.
    mutable_cpu_kernels().add(full_name(entry.def), std::move(entry.kernels));
    mutable_op_registry().add(std::move(entry.def));
  }
  return {names.begin(), names.end()};
}

}  // namespace

std::vector<std::string> load_extension(const std::string& path) {
  static std::mutex mutex;
  static auto* const loaded = new std::map<void*, std::vector<std::string>>();
  const std::lock_guard lock(mutex);

  // A path with a slash: dlopen would search its directories for a bare name.
  const std::string file = path.find('/') == std::string::npos ? "./" + path : path;
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw FileError(str("extension '", path, "': ", reason == nullptr ? "not found" : reason));
  }
  const auto found = loaded->find(library);
  if (found != loaded->end()) return found->second;

  return with_context(str("extension '", path, "': "), [&] {
    const auto entry =
        reinterpret_cast<OrtrainExtensionEntry>(dlsym(library, kOrtrainExtensionEntry));
    if (entry == nullptr) {
      dlclose(library);
      throw InvalidModelError(str("it has no function ", kOrtrainExtensionEntry));
    }
    OrtrainRegistrar registrar;
    extension::host().set_error(kOrtrainErrorModel, "it was built for another version of ortrain");
    // From here on the library stays: what it registered may be called.
    if (entry(&extension::host(), &registrar) != 0) extension::throw_last_error();
    std::vector<std::string> names = add_all(std::move(registrar.entries));
    log_line("dispatch", str(path, ": ", names.size(), " operators"));
    loaded->emplace(library, names);
    return names;
  });
}

}  // namespace ortrain
