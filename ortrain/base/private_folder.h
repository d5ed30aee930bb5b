// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace ortrain {

// "~" and "~/..." with the user's home in its place; "" if there is none.
std::string expand_home(const std::string& path);

// A folder that only its user can open, for files that must be nobody else's.
class PrivateFolder {
 public:
  // Makes the folder, and those above it, if `create`; nullopt with a reason if it cannot be
  // opened, is not owned by the user, or others have rights to it.
  static std::optional<PrivateFolder> open(const std::string& path, bool create, std::string* why);
  PrivateFolder(PrivateFolder&& other) noexcept : descriptor_(other.descriptor_) {
    other.descriptor_ = -1;
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  ~PrivateFolder();

  // All bytes of a file of the user's; nullopt if there is none, or it is no plain file.
  std::optional<std::string> read(const std::string& name) const;
  // Readers see the file as it was, or whole. False with a reason if it cannot be written.
  bool write(const std::string& name, const std::string& bytes, std::string* why) const;

 private:
  explicit PrivateFolder(int descriptor) : descriptor_(descriptor) {}
  int descriptor_;
};

}  // namespace ortrain
