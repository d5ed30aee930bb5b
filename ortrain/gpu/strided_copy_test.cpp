// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/strided_copy.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "ortrain/base/error.h"
#include "ortrain/cpu/strided_copy.h"

namespace ortrain::gpu {
namespace {

// Bytes at a place that is `shift` bytes off any alignment of 64.
class Bytes {
 public:
  Bytes(int64_t count, int64_t shift, int seed) : bytes_(static_cast<size_t>(count + shift) + 192) {
    std::mt19937 random(static_cast<unsigned>(seed));
    for (unsigned char& byte : bytes_) byte = static_cast<unsigned char>(random());
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    start_ = static_cast<size_t>((64 - address % 64) % 64) + 64 + static_cast<size_t>(shift);
  }
  unsigned char* data() { return bytes_.data() + start_; }
  // What lies in front and behind counts too; places depend on the allocation.
  std::vector<unsigned char> around(int64_t count) const {
    return {bytes_.begin() + static_cast<std::ptrdiff_t>(start_) - 16,
            bytes_.begin() + static_cast<std::ptrdiff_t>(start_) + count + 16};
  }
  void put(const std::vector<unsigned char>& values) {
    std::copy(values.begin(), values.end(),
              bytes_.begin() + static_cast<std::ptrdiff_t>(start_) - 16);
  }

 private:
  std::vector<unsigned char> bytes_;
  size_t start_ = 0;
};

// The same box copied by the CPU and by the kernels, in two thread orders.
void expect_same_copy(size_t size, const Dims& dims, const Dims& in, const Dims& out,
                      int64_t in_offset, int64_t in_elements, int64_t out_elements,
                      int64_t shift_elements) {
  const auto bytes = static_cast<int64_t>(size);
  Bytes from(in_elements * bytes, shift_elements * bytes, 1);
  for (const simulator::ThreadOrder order :
       {simulator::ThreadOrder::ascending, simulator::ThreadOrder::descending}) {
    simulator::set_thread_order(order);
    Bytes expected(out_elements * bytes, shift_elements * bytes, 2);
    Bytes actual(out_elements * bytes, shift_elements * bytes, 3);
    actual.put(expected.around(out_elements * bytes));
    cpu::StridedCopy(size, dims, in, out, in_offset).run(from.data(), expected.data());
    StridedCopy(size, dims, in, out, in_offset).run(from.data(), actual.data(), nullptr);
    ASSERT_EQ(actual.around(out_elements * bytes), expected.around(out_elements * bytes))
        << "size " << size << " dims " << dims_str(dims) << " in " << dims_str(in) << " out "
        << dims_str(out) << " shift " << shift_elements;
  }
  simulator::set_thread_order(simulator::ThreadOrder::ascending);
}

TEST(GpuStridedCopy, PermutationsEqualTheCpu) {
  const std::vector<Dims> shapes = {{130, 68},   {65, 67},       {16, 16}, {200, 17},
                                    {3, 40, 36}, {2, 20, 3, 24}, {1000},   {7, 15}};
  for (size_t size : {1u, 2u, 4u, 8u}) {
    for (const Dims& dims : shapes) {
      const Dims dense = strides_of(dims);
      std::vector<size_t> order(dims.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      do {
        Dims to, strides;
        for (size_t axis : order) {
          to.push_back(dims[axis]);
          strides.push_back(dense[axis]);
        }
        for (int64_t shift : {0, 1}) {
          expect_same_copy(size, to, strides, strides_of(to), 0, num_elements(dims),
                           num_elements(dims), shift);
          if (HasFatalFailure()) return;
        }
      } while (dims.size() < 4 && std::next_permutation(order.begin(), order.end()));
    }
  }
}

TEST(GpuStridedCopy, BoxesEqualTheCpu) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int round = 0; round < 300; ++round) {
    const auto rank = static_cast<size_t>(1 + below(4));
    Dims whole, dims, out_whole;
    for (size_t k = 0; k < rank; ++k) {
      whole.push_back(1 + below(k + 1 == rank ? 64 : 9));
      dims.push_back(1 + below(whole[k]));
      out_whole.push_back(dims[k] + (below(2) == 0 ? 0 : 4 * below(3)));
    }
    if (below(2) == 0) {  // often of full vectors
      whole.back() = 32;
      dims.back() = 16;
      out_whole.back() = below(2) == 0 ? 16 : 48;
    }
    Dims in = strides_of(whole);
    int64_t offset = 0;
    for (size_t k = 0; k < rank; ++k) {
      const int64_t way = below(5);
      if (way == 0) in[k] = 0;  // repeated
      if (way == 1) {           // turned round
        offset += (dims[k] - 1) * in[k];
        in[k] = -in[k];
      }
    }
    const size_t size = size_t{1} << below(4);
    expect_same_copy(size, dims, in, strides_of(out_whole), offset, num_elements(whole),
                     num_elements(out_whole), below(3));
    if (HasFatalFailure()) return;
  }
}

TEST(GpuStridedCopy, TooManyAxes) {
  Dims dims(30, 2), in;
  for (size_t k = 0; k < dims.size(); ++k) in.push_back(int64_t{3} * (int64_t{1} << k));
  EXPECT_THROW(StridedCopy(4, dims, in, strides_of(dims)), UnsupportedError);
  EXPECT_TRUE(refusal_of([&] { StridedCopy(4, dims, in, strides_of(dims)); }).has_value());
  EXPECT_FALSE(refusal_of([] {}).has_value());
}

TEST(GpuStridedCopy, FillsElements) {
  for (size_t size : {1u, 2u, 4u, 8u}) {
    for (int64_t count : {0, 1, 7, 64, 1000}) {
      for (int64_t shift : {0, 1}) {
        const auto bytes = static_cast<int64_t>(size);
        const uint64_t bits = 0x1122334455667788u;
        Bytes expected(count * bytes, shift * bytes, 2), actual(count * bytes, shift * bytes, 3);
        actual.put(expected.around(count * bytes));
        cpu::fill_elements(expected.data(), count, size, &bits);
        fill_elements(actual.data(), count, size, bits, nullptr);
        EXPECT_EQ(actual.around(count * bytes), expected.around(count * bytes));
      }
    }
  }
}

TEST(Divider, DividesAllBelowTwoToThe31) {
  std::mt19937 random(3);
  std::vector<int64_t> numbers = {0,
                                  1,
                                  2,
                                  3,
                                  5,
                                  7,
                                  31,
                                  32,
                                  33,
                                  641,
                                  65535,
                                  65536,
                                  65537,
                                  1 << 30,
                                  (1 << 30) + 1,
                                  INT32_MAX - 1,
                                  INT32_MAX};
  for (int i = 0; i < 300; ++i) numbers.push_back(static_cast<int64_t>(random() >> 1));
  for (int64_t by : numbers) {
    if (by == 0) continue;
    const Divider divider(by);
    for (int64_t n : numbers) {
      ASSERT_EQ(divider.divide(static_cast<uint32_t>(n)), n / by) << n << " / " << by;
      ASSERT_EQ(divider.divide(n << 20), (n << 20) / by);
    }
  }
}

}  // namespace
}  // namespace ortrain::gpu
