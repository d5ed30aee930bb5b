// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/confined_file.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/ir/text_scanner.h"

namespace ortrain {
namespace {

// read and write take at most 0x7ffff000 bytes at once.
constexpr size_t kMaxTransfer = size_t{1} << 30;

std::string system_error(int error) { return std::string(": ") + std::strerror(error); }

FileHandle open_directory(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.empty() ? "." : path;
  FileHandle handle(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!handle.valid()) {
    throw FileError(
        str("cannot open the folder ", quoted_text(folder.string()), system_error(errno)));
  }
  return handle;
}

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISLNK(mode)) return "a symbolic link";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  if (S_ISSOCK(mode)) return "a socket";
  return "no regular file";
}

// Names in a file come from its author, so each is judged before the system sees it.
void check_name(std::string_view name) {
  const char* problem = nullptr;
  if (name.empty()) {
    problem = "is empty";
  } else if (name.find('\0') != std::string_view::npos) {
    problem = "holds a NUL";
  } else if (name.find('\\') != std::string_view::npos) {
    problem = "holds a backslash";
  } else if (name.front() == '/') {
    problem = "is absolute";
  } else if (name.back() == '/') {
    problem = "names a folder";
  } else if (name.size() >= 4096) {
    problem = "is too long";
  }
  for (size_t begin = 0; begin <= name.size() && problem == nullptr;) {
    const size_t end = std::min(name.find('/', begin), name.size());
    if (name.substr(begin, end - begin) == "..") problem = "leads out of the folder";
    begin = end + 1;
  }
  if (problem != nullptr) {
    throw InvalidModelError(str("the file name ", quoted_text(name.substr(0, 200)), " ", problem));
  }
}

[[noreturn]] void fail_to_open(const std::string& name, int error) {
  if (error == ELOOP || error == EXDEV || error == ENOTDIR) {
    throw InvalidModelError(
        str("the file name ", quoted_text(name), " leads through a link or out of the folder"));
  }
  throw FileError(str("cannot open ", quoted_text(name), system_error(error)));
}

int open_beneath(int directory, const std::string& name, int flags) {
  open_how how{};
  how.flags = static_cast<uint64_t>(flags);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const long result = ::syscall(SYS_openat2, directory, name.c_str(), &how, sizeof(how));
    // EAGAIN: something moved while the kernel walked.
    if (result >= 0 || errno != EAGAIN) return static_cast<int>(result);
  }
  return -1;
}

// The same, one folder at a time. `name` has no "..", and no link is followed.
int open_walking(int directory, const std::string& name, int flags) {
  FileHandle folder;
  int current = directory;
  for (size_t begin = 0;;) {
    const size_t end = name.find('/', begin);
    if (end == std::string::npos) {
      return ::openat(current, name.c_str() + begin, flags | O_NOFOLLOW);
    }
    const std::string part = name.substr(begin, end - begin);
    begin = end + 1;
    if (part.empty() || part == ".") continue;
    FileHandle next(::openat(current, part.c_str(), O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!next.valid()) return -1;
    folder = std::move(next);
    current = folder.get();
  }
}

}  // namespace

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
  if (this != &other) {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = other.release();
  }
  return *this;
}

FileHandle::~FileHandle() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

int FileHandle::release() { return std::exchange(descriptor_, -1); }

void InputFile::read(uint64_t offset, void* data, size_t size) const {
  auto* to = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t count =
        ::pread(handle_.get(), to, std::min(size, kMaxTransfer), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw FileError(str("cannot read ", label_, system_error(errno)));
    if (count == 0) throw FileError(str("cannot read ", label_, ": it became shorter"));
    to += count;
    offset += static_cast<uint64_t>(count);
    size -= static_cast<size_t>(count);
  }
}

InputFile open_regular_file(const std::filesystem::path& path) {
  const std::string label = quoted_text(path.string());
  struct stat status{};
  if (::stat(path.c_str(), &status) != 0) {
    throw FileError(str("cannot open ", label, system_error(errno)));
  }
  if (!S_ISREG(status.st_mode)) throw FileError(str(label, " is ", kind_of(status.st_mode)));
  FileHandle handle(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!handle.valid()) throw FileError(str("cannot open ", label, system_error(errno)));
  if (::fstat(handle.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    throw FileError(str(label, " changed while it was opened"));
  }
  return InputFile(std::move(handle), static_cast<uint64_t>(status.st_size), label);
}

ConfinedDirectory::ConfinedDirectory(const std::filesystem::path& directory, Method method)
    : directory_(open_directory(directory)), method_(method) {}

FileHandle ConfinedDirectory::resolve(const std::string& name, int flags, bool allow_links) const {
  flags |= O_CLOEXEC;
  int descriptor = -1;
  if (allow_links) {
    descriptor = ::openat(directory_.get(), name.c_str(), flags);
  } else {
    const bool walk = method_ == Method::walk;
    if (!walk) descriptor = open_beneath(directory_.get(), name, flags);
    // Old kernels lack the call, and some sandboxes forbid it.
    if (walk || (descriptor < 0 && (errno == ENOSYS || errno == EPERM))) {
      descriptor = open_walking(directory_.get(), name, flags);
    }
  }
  if (descriptor < 0) fail_to_open(name, errno);
  return FileHandle(descriptor);
}

InputFile ConfinedDirectory::open(std::string_view name_view, bool allow_links) const {
  check_name(name_view);
  const std::string name(name_view);
  // O_PATH looks without opening: a FIFO would block, a device would act.
  const int look = allow_links ? O_PATH : O_PATH | O_NOFOLLOW;
  const FileHandle seen = resolve(name, look, allow_links);
  struct stat before{};
  if (::fstat(seen.get(), &before) != 0) fail_to_open(name, errno);
  if (!S_ISREG(before.st_mode)) {
    throw InvalidModelError(
        str("the file name ", quoted_text(name), " is that of ", kind_of(before.st_mode)));
  }
  if (!allow_links && before.st_nlink > 1) {
    throw InvalidModelError(str("the file ", quoted_text(name), " has ", before.st_nlink,
                                " hard links; it may be somebody else's"));
  }
  FileHandle handle = resolve(name, O_RDONLY | O_NONBLOCK | O_NOCTTY, allow_links);
  struct stat after{};
  if (::fstat(handle.get(), &after) != 0) fail_to_open(name, errno);
  if (after.st_dev != before.st_dev || after.st_ino != before.st_ino) {
    throw InvalidModelError(
        str("the file ", quoted_text(name), " was replaced while it was opened"));
  }
  return InputFile(std::move(handle), static_cast<uint64_t>(after.st_size), quoted_text(name));
}

OutputFile::OutputFile(const std::filesystem::path& directory, std::string name)
    : label_(quoted_text((directory / name).string())), name_(std::move(name)) {
  if (name_.empty() || name_ == "." || name_ == ".." ||
      name_.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
    throw FileError(str(quoted_text(name_), " is no plain file name"));
  }
  directory_ = open_directory(directory);
  struct stat status{};
  if (::fstatat(directory_.get(), name_.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
      !S_ISREG(status.st_mode) && !S_ISLNK(status.st_mode)) {
    throw FileError(str("cannot replace ", label_, ": it is ", kind_of(status.st_mode)));
  }
  static std::atomic<uint64_t> counter{0};
  do {
    temporary_name_ = str(".ortrain-", ::getpid(), "-", counter++, ".tmp");
    handle_ = FileHandle(::openat(directory_.get(), temporary_name_.c_str(),
                                  O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  } while (!handle_.valid() && errno == EEXIST);
  if (!handle_.valid()) fail("create");
}

OutputFile::~OutputFile() {
  if (!committed_ && handle_.valid()) ::unlinkat(directory_.get(), temporary_name_.c_str(), 0);
}

void OutputFile::fail(std::string_view action) const {
  const int error = errno;
  throw FileError(
      str("cannot ", action, " ", label_, " after ", size_, " bytes", system_error(error)));
}

void OutputFile::write(const void* data, size_t size) {
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::write(handle_.get(), from, std::min(size, kMaxTransfer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail("write");
    from += count;
    size -= static_cast<size_t>(count);
    size_ += static_cast<uint64_t>(count);
  }
}

void OutputFile::commit() {
  if (::fsync(handle_.get()) != 0) fail("flush");
  if (::renameat(directory_.get(), temporary_name_.c_str(), directory_.get(), name_.c_str()) != 0) {
    fail("replace");
  }
  committed_ = true;
  // The new name must survive a power cut as well.
  if (::fsync(directory_.get()) != 0) fail("flush the folder of");
}

}  // namespace ortrain
