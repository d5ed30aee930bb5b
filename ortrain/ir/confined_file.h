// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace ortrain {

// An open file descriptor.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int descriptor) : descriptor_(descriptor) {}
  FileHandle(FileHandle&& other) noexcept : descriptor_(other.release()) {}
  FileHandle& operator=(FileHandle&& other) noexcept;
  ~FileHandle();

  int get() const { return descriptor_; }
  bool valid() const { return descriptor_ >= 0; }

 private:
  int release();
  int descriptor_ = -1;
};

// A regular file, open for reading.
class InputFile {
 public:
  InputFile(FileHandle handle, uint64_t size, std::string label)
      : handle_(std::move(handle)), size_(size), label_(std::move(label)) {}

  uint64_t size() const { return size_; }
  // Throws FileError when the bytes cannot be read, also when the file became shorter.
  void read(uint64_t offset, void* data, size_t size) const;

 private:
  FileHandle handle_;
  uint64_t size_;
  std::string label_;  // quoted path for messages
};

// Opens a regular file that the user named. Anything else (folder, FIFO, device) is not opened and
// is a FileError.
InputFile open_regular_file(const std::filesystem::path& path);

// Opens files whose names come out of another file, so that no name leads out of the folder.
class ConfinedDirectory {
 public:
  // walk: folder by folder, for kernels and sandboxes without openat2.
  enum class Method { automatic, walk };

  // Throws FileError when it is no folder.
  explicit ConfinedDirectory(const std::filesystem::path& directory,
                             Method method = Method::automatic);

  // `name` is relative, with '/' between folders. Throws InvalidModelError for a name that is
  // empty, absolute, has "..", a backslash or a NUL; for anything but a regular file, which is not
  // opened; for a symbolic link on the way and a file with several hard links, unless links are
  // allowed. Throws FileError when there is no such file.
  InputFile open(std::string_view name, bool allow_links = false) const;

 private:
  FileHandle resolve(const std::string& name, int flags, bool allow_links) const;

  FileHandle directory_;
  Method method_;
};

// A file that is written aside and takes its name, all at once, on commit. What is not committed is
// removed. The name is that of a file in the folder itself; a link of that name is replaced, not
// followed.
class OutputFile {
 public:
  // Throws FileError, also when `name` is no plain file name.
  OutputFile(const std::filesystem::path& directory, std::string name);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  void write(const void* data, size_t size);
  uint64_t size() const { return size_; }
  // Flushes to the disk, then renames.
  void commit();

 private:
  [[noreturn]] void fail(std::string_view action) const;

  FileHandle directory_;
  FileHandle handle_;
  std::string label_;
  std::string name_;
  std::string temporary_name_;
  uint64_t size_ = 0;
  bool committed_ = false;
};

}  // namespace ortrain
