// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <string>

namespace ortrain::fuzz {

// What extents, counts and attributes are set to, besides small numbers: the ends of types, and
// powers whose products wrap.
inline constexpr int64_t kExtremes[] = {0,
                                        -1,
                                        1,
                                        INT64_MAX,
                                        INT64_MIN,
                                        int64_t{1} << 31,
                                        (int64_t{1} << 31) - 1,
                                        -(int64_t{1} << 31),
                                        int64_t{1} << 32,
                                        (int64_t{1} << 32) + 1,
                                        int64_t{1} << 33,
                                        int64_t{1} << 40,
                                        int64_t{1} << 46,
                                        int64_t{1} << 47,
                                        int64_t{1} << 61,
                                        int64_t{1} << 62,
                                        (int64_t{1} << 62) + 1,
                                        INT64_MAX / 3,
                                        3037000500,
                                        65536,
                                        65535,
                                        64};

// Takes decisions out of the bytes of an input; zeros once they are used up.
class ByteSource {
 public:
  explicit ByteSource(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  bool empty() const { return bytes_.empty(); }
  size_t size() const { return bytes_.size(); }

  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }
  bool flag() { return (byte() & 1) != 0; }
  // In [0, limit); limit > 0.
  size_t below(size_t limit) {
    const size_t low = byte();
    return (limit <= 256 ? low : low << 8 | byte()) % limit;
  }
  // Once in `of` times; never where the bytes are used up.
  bool rarely(size_t of) { return below(of) == of - 1; }
  template <class T>
  T any() {
    T value{};
    const size_t taken = bytes_.size() < sizeof(T) ? bytes_.size() : sizeof(T);
    if (taken > 0) std::memcpy(&value, bytes_.data(), taken);
    bytes_ = bytes_.subspan(taken);
    return value;
  }
  // A small number, an extreme one, one beside it, or any.
  int64_t extent() {
    const uint8_t kind = byte();
    if (kind < 128) return kind % 9;
    if (kind < 208) return kExtremes[(kind - 128) % std::size(kExtremes)];
    if (kind < 240) {
      return static_cast<int64_t>(static_cast<uint64_t>(kExtremes[kind % std::size(kExtremes)]) +
                                  byte() - 128);
    }
    return any<int64_t>();
  }
  std::string text(size_t most) {
    const size_t wanted = below(most + 1);
    const size_t taken = bytes_.size() < wanted ? bytes_.size() : wanted;
    std::string result(reinterpret_cast<const char*>(bytes_.data()), taken);
    bytes_ = bytes_.subspan(taken);
    return result;
  }
  std::span<const uint8_t> take(size_t count) {
    const auto taken = bytes_.first(bytes_.size() < count ? bytes_.size() : count);
    bytes_ = bytes_.subspan(taken.size());
    return taken;
  }
  std::span<const uint8_t> rest() { return take(bytes_.size()); }

 private:
  std::span<const uint8_t> bytes_;
};

// Splitmix64: numbers for contents and for mutations, from a seed alone.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  size_t below(size_t limit) { return static_cast<size_t>(next() % limit); }
  int64_t extreme() { return kExtremes[below(std::size(kExtremes))]; }

 private:
  uint64_t state_;
};

inline uint64_t hash_bytes(std::span<const uint8_t> bytes) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

}  // namespace ortrain::fuzz
