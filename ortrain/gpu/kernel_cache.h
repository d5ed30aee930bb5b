// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace ortrain::gpu {

// Compiled kernels on the disk, shared by the processes of one user. Files are written at once
// (another name, then renamed), and used only if they are whole and hold the key in full. The
// folder and its files must belong to the user, the folder be open to nobody else: what is in there
// is run.
class KernelCache {
 public:
  // "" = no cache.
  explicit KernelCache(std::string folder) : folder_(std::move(folder)) {}
  // By ORTRAIN_KERNEL_CACHE_DIR.
  static KernelCache from_flag();

  // The code stored for this key; nullopt if there is none, or its file is damaged.
  std::optional<std::string> find(const std::string& key) const;
  // False with a reason where the folder cannot be written. True without a cache.
  bool store(const std::string& key, const std::string& code, std::string* why) const;

  // The file of a key inside the folder.
  static std::string file_name(const std::string& key);

 private:
  std::string folder_;
};

}  // namespace ortrain::gpu
