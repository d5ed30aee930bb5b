// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/private_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

// Closes a file when its scope ends.
struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

std::string system_error() { return std::strerror(errno); }

}  // namespace

std::string expand_home(const std::string& path) {
  if (path != "~" && !path.starts_with("~/")) return path;
  const char* home = std::getenv("HOME");
  return home == nullptr || *home == '\0' ? "" : home + path.substr(1);
}

std::optional<PrivateFolder> PrivateFolder::open(const std::string& path, bool create,
                                                 std::string* why) {
  if (create) {
    std::error_code error;
    const std::filesystem::path above = std::filesystem::path(path).parent_path();
    if (!above.empty()) std::filesystem::create_directories(above, error);
    if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
      *why = str("cannot make ", path, ": ", system_error());
      return std::nullopt;
    }
  }
  PrivateFolder folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (folder.descriptor_ < 0) {
    *why = str("cannot open the folder ", path, ": ", system_error());
    return std::nullopt;
  }
  struct stat status{};
  if (fstat(folder.descriptor_, &status) != 0 || status.st_uid != geteuid()) {
    *why = str("the folder ", path, " belongs to another user");
    return std::nullopt;
  }
  if ((status.st_mode & 077) != 0) {
    *why = str("the folder ", path, " is open to other users (chmod 700)");
    return std::nullopt;
  }
  return folder;
}

PrivateFolder::~PrivateFolder() {
  if (descriptor_ >= 0) close(descriptor_);
}

std::optional<std::string> PrivateFolder::read(const std::string& name) const {
  const Descriptor file{openat(descriptor_, name.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC)};
  struct stat status{};
  if (file.number < 0 || fstat(file.number, &status) != 0 || !S_ISREG(status.st_mode) ||
      status.st_uid != geteuid()) {
    return std::nullopt;
  }
  std::string bytes(static_cast<size_t>(status.st_size), '\0');
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count = ::read(file.number, bytes.data() + done, bytes.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    done += static_cast<size_t>(count);
  }
  return bytes;
}

bool PrivateFolder::write(const std::string& name, const std::string& bytes,
                          std::string* why) const {
  static std::atomic<unsigned> count{0};
  const std::string temporary = str(name, ".", getpid(), ".", count++, ".tmp");
  const auto fail = [&](const char* what) {
    *why = str(what, " ", temporary, ": ", system_error());
    unlinkat(descriptor_, temporary.c_str(), 0);
    return false;
  };
  {
    const Descriptor file{openat(descriptor_, temporary.c_str(),
                                 O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)};
    if (file.number < 0) return fail("cannot make");
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t written = ::write(file.number, bytes.data() + done, bytes.size() - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return fail("cannot write");
      done += static_cast<size_t>(written);
    }
  }
  if (renameat(descriptor_, temporary.c_str(), descriptor_, name.c_str()) != 0) {
    return fail("cannot rename");
  }
  return true;
}

}  // namespace ortrain
