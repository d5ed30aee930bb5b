// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Thousands of damaged models: each loads or is refused with a typed error.
#include <gtest/gtest.h>

#include <random>

#include "ortrain/ir/graph_compare.h"
#include "ortrain/ir/onnx_model_test.h"
#include "ortrain/ir/text.h"
#include "ortrain/ir/verifier.h"

namespace ortrain {
namespace {

std::vector<std::string> seed_models() {
  std::vector<std::string> seeds{foreign_model().SerializeAsString()};
  onnx::ModelProto typed = model_with_initializer(10, {3});
  for (int bits : {1, 2, 3}) typed.mutable_graph()->mutable_initializer(0)->add_int32_data(bits);
  auto* value =
      add_attribute(add_node(typed, "Constant", {}, {"k"}), "value", onnx::AttributeProto::TENSOR)
          ->mutable_t();
  value->set_data_type(7);
  value->add_dims(2);
  value->add_int64_data(1);
  value->add_int64_data(-1);
  add_node(typed, "Reshape", {"x", "k"}, {"r"});
  seeds.push_back(typed.SerializeAsString());
  const Graph graph = parse_graph(R"(
graph m (float32[b, 2*s + 1] x, float32[4, 1] w [parameter fc.weight grad], int64 s [seed],
         float32[b, 2*s + 1] dy [gradient y]) => (y, dx as xg [gradient x], y as y2) {
  y, _ = Dropout <seed = 3> (x, float32 0.5) @layer.0/Dropout
  e = ortrain::Everything <i = 1, f = 0.1, s = "a", is = [1, -2], fs = [1, 2.5], ss = ["", "b"],
      t = float16[2] {1, 2}, e: floats = []> (x)
  t = Shape(x)
  r = Reshape(e, t)
  n = NonZero(r)
backward:
  dx = Softmax(dy)
})",
                                  sample_registry());
  seeds.push_back(to_onnx_bytes(graph));
  return seeds;
}

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  std::string mutate(std::string bytes, const std::string& other) {
    const size_t edits = 1 + below(3);
    for (size_t i = 0; i < edits && !bytes.empty(); ++i) edit(bytes, other);
    return bytes;
  }

 private:
  size_t below(size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random_);
  }

  void edit(std::string& bytes, const std::string& other) {
    static constexpr unsigned char kInteresting[] = {0, 1, 2, 7, 8, 0x7f, 0x80, 0x81, 0xfe, 0xff};
    const size_t at = below(bytes.size());
    const size_t length = 1 + below(std::min<size_t>(bytes.size() - at, 16));
    switch (below(7)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(kInteresting[below(std::size(kInteresting))]);
        break;
      case 2:
        bytes.erase(at, length);
        break;
      case 3:
        bytes.insert(at, bytes.substr(at, length));
        break;
      case 4:
        bytes.insert(at, other.substr(below(other.size()), length));
        break;
      case 5:
        bytes.insert(at, length, static_cast<char>(below(256)));
        break;
      case 6:
        std::swap(bytes[at], bytes[below(bytes.size())]);
        break;
    }
  }

  std::mt19937 random_;
};

TEST(onnx_mutation, damaged_models_load_or_are_refused) {
  const std::vector<std::string> seeds = seed_models();
  Mutator mutator(20240607);
  int loaded = 0;
  int refused = 0;
  for (int round = 0; round < 30000; ++round) {
    const std::string& seed = seeds[static_cast<size_t>(round) % seeds.size()];
    const std::string& other = seeds[static_cast<size_t>(round + 1) % seeds.size()];
    const std::string bytes = mutator.mutate(seed, other);
    SCOPED_TRACE(round);
    try {
      const OnnxModel model = load_bytes(bytes);
      ++loaded;
      // What was accepted is sound, and can be written and read again.
      verify(model.graph, sample_registry());
      const OnnxModel again = load_bytes(to_onnx_bytes(model.graph));
      ASSERT_EQ(first_difference(model.graph, again.graph), "");
    } catch (const InvalidModelError& error) {
      ++refused;
      EXPECT_STRNE(error.what(), "");
    } catch (const UnsupportedError&) {
      ++refused;
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
      break;
    }
  }
  EXPECT_GT(loaded, 500);
  EXPECT_GT(refused, 500);
}

TEST(onnx_mutation, damaged_texts_parse_or_are_refused) {
  const std::string text = print_graph(load_bytes(seed_models().back()).graph);
  Mutator mutator(7);
  int parsed = 0;
  for (int round = 0; round < 5000; ++round) {
    SCOPED_TRACE(round);
    const std::string damaged = mutator.mutate(text, text);
    try {
      parse_graph(damaged, sample_registry());
      ++parsed;
    } catch (const InternalError& error) {
      ADD_FAILURE() << error.what();
    } catch (const Error&) {
      continue;
    }
  }
  EXPECT_GT(parsed, 50);
}

}  // namespace
}  // namespace ortrain
