// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/kernel_cache.h"

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "ortrain/base/flags.h"
#include "ortrain/base/private_folder.h"

namespace ortrain::gpu {
namespace {

// In front of the key and the code.
struct Header {
  char magic[8] = {'O', 'R', 'T', 'K', 'E', 'R', 'N', '1'};
  uint64_t key_bytes = 0;
  uint64_t code_bytes = 0;
  uint64_t checksum = 0;  // of key and code
};

// FNV-1a. The key in the file is compared in full, so names may meet.
uint64_t hash_of(const std::string& bytes, uint64_t start) {
  uint64_t hash = start;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

constexpr uint64_t kStart = 0xcbf29ce484222325u;

}  // namespace

KernelCache KernelCache::from_flag() {
  const std::string folder = flag("ORTRAIN_KERNEL_CACHE_DIR");
  return KernelCache(folder == "off" ? "" : expand_home(folder));
}

std::string KernelCache::file_name(const std::string& key) {
  char name[48];
  std::snprintf(name, sizeof(name), "%016llx%016llx.kernel",
                static_cast<unsigned long long>(hash_of(key, kStart)),
                static_cast<unsigned long long>(hash_of(key, ~kStart)));
  return name;
}

std::optional<std::string> KernelCache::find(const std::string& key) const {
  if (folder_.empty()) return std::nullopt;
  std::string why;
  const std::optional<PrivateFolder> folder = PrivateFolder::open(folder_, false, &why);
  if (!folder) return std::nullopt;  // store says why, where it matters
  const std::optional<std::string> file = folder->read(file_name(key));
  if (!file || file->size() < sizeof(Header)) return std::nullopt;
  Header header;
  std::memcpy(&header, file->data(), sizeof(header));
  const size_t rest = file->size() - sizeof(header);
  if (std::memcmp(header.magic, Header().magic, sizeof(header.magic)) != 0 ||
      header.key_bytes != key.size() || header.key_bytes > rest ||
      header.code_bytes != rest - header.key_bytes) {
    return std::nullopt;
  }
  std::string code = file->substr(sizeof(header) + key.size());
  if (file->compare(sizeof(header), key.size(), key) != 0 ||
      hash_of(code, hash_of(key, kStart)) != header.checksum) {
    return std::nullopt;
  }
  return code;
}

bool KernelCache::store(const std::string& key, const std::string& code, std::string* why) const {
  if (folder_.empty()) return true;
  const std::optional<PrivateFolder> folder = PrivateFolder::open(folder_, true, why);
  if (!folder) return false;
  Header header;
  header.key_bytes = key.size();
  header.code_bytes = code.size();
  header.checksum = hash_of(code, hash_of(key, kStart));
  const std::string head(reinterpret_cast<const char*>(&header), sizeof(header));
  return folder->write(file_name(key), head + key + code, why);
}

}  // namespace ortrain::gpu
