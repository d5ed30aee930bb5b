// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// The protobuf wire format, as far as ONNX needs it. cmake/onnx_messages.py generates the message
// classes of namespace `onnx` on top of it, with protobuf's accessor names. We link no libprotobuf:
// libtorch exports symbols of its own copy, and distributions ship a static library that cannot go
// into a shared object.
namespace ortrain::onnx_wire {

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5
};

// Nesting that a file may have before it is refused, as in protobuf.
inline constexpr int kMaxDepth = 100;

// A repeated scalar or string.
template <typename T>
class RepeatedField : public std::vector<T> {
 public:
  using std::vector<T>::vector;
  void Add(T value) { this->push_back(std::move(value)); }
  void Reserve(int count) { this->reserve(static_cast<size_t>(count)); }
};

// A repeated message. Pointers to elements stay valid while others are added.
template <typename T>
class RepeatedMessage {
  template <typename Base, typename Value>
  class Iterator {
   public:
    using iterator_category = std::forward_iterator_tag;
    using value_type = T;
    using difference_type = std::ptrdiff_t;
    using pointer = Value*;
    using reference = Value&;
    Iterator() = default;
    explicit Iterator(Base base) : base_(base) {}
    Value& operator*() const { return **base_; }
    Value* operator->() const { return base_->get(); }
    Iterator& operator++() {
      ++base_;
      return *this;
    }
    Iterator operator++(int) {
      Iterator before = *this;
      ++base_;
      return before;
    }
    bool operator==(const Iterator& other) const = default;

   private:
    Base base_;
  };
  using Items = std::vector<std::unique_ptr<T>>;

 public:
  using value_type = T;
  using iterator = Iterator<typename Items::iterator, T>;
  using const_iterator = Iterator<typename Items::const_iterator, const T>;

  RepeatedMessage() = default;
  RepeatedMessage(RepeatedMessage&&) noexcept = default;
  RepeatedMessage& operator=(RepeatedMessage&&) noexcept = default;
  RepeatedMessage(const RepeatedMessage& other) {
    items_.reserve(other.items_.size());
    for (const auto& item : other.items_) items_.push_back(std::make_unique<T>(*item));
  }
  RepeatedMessage& operator=(const RepeatedMessage& other) {
    if (this != &other) *this = RepeatedMessage(other);
    return *this;
  }

  int size() const { return static_cast<int>(items_.size()); }
  bool empty() const { return items_.empty(); }
  void clear() { items_.clear(); }
  void Clear() { items_.clear(); }
  void Reserve(int count) { items_.reserve(static_cast<size_t>(count)); }
  T* Add() { return items_.emplace_back(std::make_unique<T>()).get(); }
  const T& operator[](int i) const { return *items_[static_cast<size_t>(i)]; }
  const T& Get(int i) const { return *items_[static_cast<size_t>(i)]; }
  T* Mutable(int i) { return items_[static_cast<size_t>(i)].get(); }
  iterator begin() { return iterator(items_.begin()); }
  iterator end() { return iterator(items_.end()); }
  const_iterator begin() const { return const_iterator(items_.begin()); }
  const_iterator end() const { return const_iterator(items_.end()); }

 private:
  Items items_;
};

// An optional message with the value semantics of std::optional; T may be incomplete here.
template <typename T>
class OptionalMessage {
 public:
  OptionalMessage() = default;
  OptionalMessage(OptionalMessage&&) noexcept = default;
  OptionalMessage& operator=(OptionalMessage&&) noexcept = default;
  OptionalMessage(const OptionalMessage& other)
      : item_(other.item_ ? std::make_unique<T>(*other.item_) : nullptr) {}
  OptionalMessage& operator=(const OptionalMessage& other) {
    if (this != &other) *this = OptionalMessage(other);
    return *this;
  }

  bool has_value() const { return item_ != nullptr; }
  void reset() { item_.reset(); }
  const T& operator*() const { return *item_; }
  const T& get() const {
    static const T kDefault;
    return item_ ? *item_ : kDefault;
  }
  T* ensure() {
    if (!item_) item_ = std::make_unique<T>();
    return item_.get();
  }

 private:
  std::unique_ptr<T> item_;
};

const std::string& empty_string();

// Reads one message. Every function returns false on malformed input and never reads past the
// end.
class Reader {
 public:
  Reader(const void* data, size_t size, int depth)
      : at_(static_cast<const uint8_t*>(data)), end_(at_ + size), depth_(depth) {}

  bool done() const { return at_ == end_; }
  const uint8_t* position() const { return at_; }
  bool tag(uint32_t& field, uint32_t& wire);
  bool skip(uint32_t field, uint32_t wire);

  bool scalar(uint32_t wire, int32_t& value);
  bool scalar(uint32_t wire, int64_t& value);
  bool scalar(uint32_t wire, uint64_t& value);
  bool scalar(uint32_t wire, float& value);
  bool scalar(uint32_t wire, double& value);
  bool scalar(uint32_t wire, std::string& value);
  // A string of ONNX, not bytes: throws InvalidModelError where it is no UTF-8.
  bool text(uint32_t wire, std::string& value);
  bool text(uint32_t wire, std::optional<std::string>& value) {
    return text(wire, value.emplace());
  }
  bool text(uint32_t wire, RepeatedField<std::string>& values) {
    return text(wire, values.emplace_back());
  }

  template <typename T>
  bool scalar(uint32_t wire, std::optional<T>& value) {
    return scalar(wire, value.emplace());
  }

  // Takes both encodings of a repeated scalar: one by one, and packed.
  template <typename T>
  bool repeated(uint32_t wire, RepeatedField<T>& values) {
    if (wire != kBytes) return scalar(wire, values.emplace_back());
    Reader packed(nullptr, 0, depth_);
    if (!nested(packed)) return false;
    values.reserve(values.size() + packed.template count<T>());
    while (!packed.done()) {
      if (!packed.scalar(kPackedWire<T>, values.emplace_back())) return false;
    }
    return true;
  }
  bool repeated(uint32_t wire, RepeatedField<std::string>& values) {
    return scalar(wire, values.emplace_back());
  }

  template <typename M>
  bool message(uint32_t wire, M& value) {
    Reader body(nullptr, 0, depth_);
    return wire == kBytes && depth_ < kMaxDepth && nested(body) && value.merge_from(body);
  }

 private:
  template <typename T>
  static constexpr uint32_t kPackedWire = std::is_integral_v<T> ? kVarint
                                          : sizeof(T) == 8      ? kFixed64
                                                                : kFixed32;
  // Elements of a packed field of which this is the body.
  template <typename T>
  size_t count() const {
    if constexpr (!std::is_integral_v<T>) return static_cast<size_t>(end_ - at_) / sizeof(T);
    size_t ends = 0;
    for (const uint8_t* byte = at_; byte != end_; ++byte) ends += *byte < 0x80;
    return ends;
  }

  bool varint(uint64_t& value);
  bool raw(void* value, size_t size);
  bool nested(Reader& body);

  const uint8_t* at_;
  const uint8_t* end_;
  int depth_;
};

size_t varint_size(uint64_t value);

// Appends encoded fields to a string.
class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  void scalar(uint32_t field, int64_t value);
  void scalar(uint32_t field, int32_t value) { scalar(field, static_cast<int64_t>(value)); }
  void scalar(uint32_t field, uint64_t value) { scalar(field, static_cast<int64_t>(value)); }
  void scalar(uint32_t field, float value);
  void scalar(uint32_t field, double value);
  void scalar(uint32_t field, const std::string& value);

  template <typename T>
  void repeated(uint32_t field, const RepeatedField<T>& values) {
    for (const T& value : values) scalar(field, value);
  }
  template <typename T>
  void packed(uint32_t field, const RepeatedField<T>& values);
  template <typename M>
  void message(uint32_t field, const M& value) {
    header(field, value.ByteSizeLong());
    value.append_to(*this);
  }

 private:
  void varint(uint64_t value);
  void header(uint32_t field, size_t size);

  std::string& out_;
};

// Encoded sizes, tag included.
size_t scalar_size(uint32_t field, int64_t value);
inline size_t scalar_size(uint32_t field, int32_t value) {
  return scalar_size(field, static_cast<int64_t>(value));
}
inline size_t scalar_size(uint32_t field, uint64_t value) {
  return scalar_size(field, static_cast<int64_t>(value));
}
size_t scalar_size(uint32_t field, float value);
size_t scalar_size(uint32_t field, double value);
size_t scalar_size(uint32_t field, const std::string& value);
size_t bytes_size(uint32_t field, size_t size);

template <typename T>
size_t repeated_size(uint32_t field, const RepeatedField<T>& values) {
  size_t total = 0;
  for (const T& value : values) total += scalar_size(field, value);
  return total;
}
template <typename T>
size_t packed_size(uint32_t field, const RepeatedField<T>& values);

}  // namespace ortrain::onnx_wire
