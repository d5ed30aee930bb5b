// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <optional>

#include "ortrain/base/error.h"
#include "ortrain/ir/expand_context.h"
#include "ortrain/ir/op_registry.h"

namespace ortrain::ops {
namespace {

enum Inputs { kQ, kK, kV, kMask, kPastKey, kPastValue, kValidKeys };
enum Outputs { kY, kPresentKey, kPresentValue, kScores };

// Stages of the scores that output 3 may show.
enum class Stage { product, capped, masked, softmax };

// ONNX's Attention: one node of our own where the scores stay inside, else products and a softmax.
class OnnxAttention {
 public:
  explicit OnnxAttention(ExpandContext& e) : e_(e) {
    if (e.has_input(kPastKey) != e.has_input(kPastValue)) {
      throw InvalidModelError("past_key and past_value must be given together");
    }
    if (e.has_input(kPastKey) && e.has_input(kValidKeys)) {
      throw InvalidModelError("nonpad_kv_seqlen does not go with past_key");
    }
    if (e.dtype(e.input(kQ)) != e.dtype(e.input(kV))) {
      throw UnsupportedError(str("Q is ", name_of(e.dtype(e.input(kQ))), ", V ",
                                 name_of(e.dtype(e.input(kV))), "; they must be of one type"));
    }
    is_packed_ = e.rank(e.input(kQ)) == 3;
    q_ = heads_apart(kQ, "q_num_heads");
    k_ = heads_apart(kK, "kv_num_heads");
    v_ = heads_apart(kV, "kv_num_heads");
    if (e.has_input(kPastKey)) {
      for (size_t past : {kPastKey, kPastValue}) {
        if (e.rank(e.input(past)) != 4) {
          throw ShapeError(str("keys and values of earlier calls are of rank 4, one is ",
                               shape_str(e.shape(e.input(past)))));
        }
      }
      offset_ = e.squeeze(e.extent_of(e.input(kPastKey), 2), {0});
      k_ = e.concat({e.input(kPastKey), k_}, 2);
      v_ = e.concat({e.input(kPastValue), v_}, 2);
    } else if (e.has_input(kValidKeys)) {
      const ValueId lengths = e.unsqueeze(e.input(kValidKeys), {1, 2, 3});
      offset_ = e.sub(lengths, e.squeeze(e.extent_of(q_, 2), {0}));
    }
    scale_ = e.attrs().has("scale")
                 ? e.attrs().float_("scale")
                 : 1.0 / std::sqrt(static_cast<double>(e.known_extent(q_, 3, "Q, heads apart,")));
    cap_ = e.attrs().float_("softcap");
    shows_scores_ = cap_ > 0 || e.wants_output(kScores);
    build_allowed();
    build_mask();
  }

  std::vector<ValueId> build() {
    std::vector<ValueId> outputs{kNoValue, k_, v_, kNoValue};
    const int64_t mode = e_.attrs().int_("qk_matmul_output_mode");
    if (mode < 0 || mode > 3) throw InvalidModelError(str("qk_matmul_output_mode is ", mode));
    if (shows_scores_) {
      outputs[kY] = with_scores(static_cast<Stage>(mode), outputs[kScores]);
    } else {
      outputs[kY] = as_own_node();
    }
    if (is_packed_) {
      const ValueId rows = e_.transpose(outputs[kY], {0, 2, 1, 3});
      outputs[kY] = e_.reshape(rows, std::vector<int64_t>{0, 0, -1});
    }
    return outputs;
  }

 private:
  // [B, heads, S, D]
  ValueId heads_apart(size_t index, const char* attribute) {
    const ValueId x = e_.input(index);
    if (!is_packed_) {
      if (e_.rank(x) != 4) throw ShapeError(str("Q, K and V are of ranks 3 or 4 alike"));
      return x;
    }
    const int64_t heads = e_.attrs().has(attribute) ? e_.attrs().int_(attribute) : 0;
    if (heads < 1 || e_.rank(x) != 3) {
      throw InvalidModelError(str("operands of rank 3 need the attribute ", attribute));
    }
    const int64_t width = e_.known_extent(x, 2, "an operand of attention");
    if (width % heads != 0) throw ShapeError(str(width, " is no multiple of ", heads, " heads"));
    return e_.transpose(e_.reshape(x, std::vector<int64_t>{0, 0, heads, width / heads}),
                        {0, 2, 1, 3});
  }

  void allow(ValueId condition) {
    allowed_ = allowed_ == kNoValue ? condition : e_.op("And", {allowed_, condition});
  }

  // Which keys a query may see by their positions, and by a mask of booleans.
  void build_allowed() {
    const int64_t left = window("left_window_size"), right = window("right_window_size");
    is_causal_ = e_.attrs().int_("is_causal") != 0;
    // Our own node hides later keys by itself where queries and keys begin together.
    const bool hides_later = is_causal_ && (offset_ != kNoValue || shows_scores_);
    if (hides_later || left >= 0 || right >= 0) {
      ValueId query = e_.unsqueeze(e_.positions(q_, 2), {1});
      if (offset_ != kNoValue) query = e_.add(query, offset_);
      const ValueId behind = e_.sub(query, e_.positions(k_, 2));
      const auto number = [&](int64_t n) {
        return e_.constant(TensorData::int_scalar(DType::i64, n));
      };
      if (hides_later) allow(e_.op("GreaterOrEqual", {behind, number(0)}));
      if (left >= 0) allow(e_.op("LessOrEqual", {behind, number(left)}));
      if (right >= 0) allow(e_.op("GreaterOrEqual", {behind, number(-right)}));
      is_causal_ = is_causal_ && !hides_later;
    }
    if (e_.has_input(kValidKeys)) {
      const ValueId lengths = e_.unsqueeze(e_.input(kValidKeys), {1, 2, 3});
      allow(e_.op("Less", {e_.positions(k_, 2), lengths}));
    }
    const ValueId mask = whole_mask();
    if (mask != kNoValue && e_.dtype(mask) == DType::boolean) allow(mask);
  }

  int64_t window(const char* attribute) const {
    const int64_t size = e_.attrs().int_(attribute);
    if (size < -1) throw InvalidModelError(str(attribute, " is ", size));
    return size;
  }

  // The mask; keys behind its end are hidden.
  ValueId whole_mask() {
    const ValueId mask = e_.input(kMask);
    if (mask == kNoValue || e_.rank(mask) == 0) return mask;
    const Dim& given = e_.shape(mask).back();
    const Dim& keys = e_.shape(k_)[2];
    if (!given.is_constant() || !keys.is_constant() || given.constant() >= keys.constant() ||
        given.constant() == 1) {
      return mask;
    }
    std::vector<int64_t> pads(2 * e_.shape(mask).size(), 0);
    pads.back() = keys.constant() - given.constant();
    const DType type = e_.dtype(mask);
    const ValueId hidden = type == DType::boolean
                               ? e_.constant(TensorData::int_scalar(type, 0))
                               : e_.scalar(type, -std::numeric_limits<double>::infinity());
    return e_.op("Pad", {mask, e_.int64s(pads), hidden});
  }

  // `allowed_` and what is added to the scores as one tensor; kNoValue: neither.
  void build_mask() {
    mask_ = allowed_;
    const ValueId given = whole_mask();
    if (given == kNoValue || e_.dtype(given) == DType::boolean) return;
    mask_ = e_.cast(given, e_.dtype(q_));
    if (allowed_ != kNoValue) mask_ = e_.where(allowed_, mask_, minus_infinity());
  }

  ValueId minus_infinity() {
    return e_.scalar(e_.dtype(q_), -std::numeric_limits<double>::infinity());
  }

  ValueId as_own_node() {
    std::vector<ValueId> inputs{q_, k_, v_};
    if (mask_ != kNoValue) inputs.push_back(mask_);
    return e_.own("Attention", std::move(inputs),
                  {{"scale", scale_}, {"is_causal", static_cast<int64_t>(is_causal_)}});
  }

  // Heads of keys or values, each as often as queries share it.
  ValueId repeated(ValueId x) {
    const Dim &heads = e_.shape(q_)[1], &own = e_.shape(x)[1];
    if (heads == own) return x;
    const int64_t wanted = e_.known_extent(q_, 1, "Q"), held = e_.known_extent(x, 1, "K");
    if (held < 1 || wanted % held != 0) {
      throw ShapeError(str(wanted, " query heads cannot share ", held, " key heads evenly"));
    }
    const ValueId apart = e_.unsqueeze(x, {2});
    const ValueId shape = e_.int64s({1, 1, wanted / held, 1, 1});
    const ValueId expanded = e_.op("Expand", {apart, shape});
    return e_.reshape(expanded, e_.concat({e_.extent_of(x, 0), e_.int64s({wanted}),
                                           e_.extent_of(x, 2), e_.extent_of(x, 3)},
                                          0));
  }

  ValueId with_scores(Stage shown, ValueId& scores_output) {
    const DType type = e_.dtype(q_);
    const ValueId keys = e_.transpose(repeated(k_), {0, 1, 3, 2});
    ValueId scores = e_.mul(e_.op("MatMul", {q_, keys}), scale_);
    if (shown == Stage::product) scores_output = scores;
    if (cap_ > 0) scores = e_.mul(e_.unary("Tanh", e_.div(scores, cap_)), cap_);
    if (shown == Stage::capped) scores_output = scores;
    const ValueId seen = visible();
    if (mask_ != kNoValue && e_.dtype(mask_) != DType::boolean) scores = e_.add(scores, mask_);
    if (seen != kNoValue) scores = e_.where(seen, scores, minus_infinity());
    if (shown == Stage::masked) scores_output = scores;
    if (const auto precision = e_.attrs().optional_int("softmax_precision")) {
      const std::optional<DType> wanted = dtype_from_onnx(*precision);
      if (!wanted || !is_float(*wanted)) {
        throw InvalidModelError(str("softmax_precision is ", *precision, ", no type of floats"));
      }
      scores = e_.cast(scores, *wanted);
    }
    ValueId weights = softmax(scores, seen);
    weights = e_.cast(weights, type);
    if (shown == Stage::softmax) scores_output = weights;
    return e_.op("MatMul", {weights, repeated(v_)});
  }

  // Which keys each query sees, of masks of both kinds; kNoValue: all.
  ValueId visible() {
    if (mask_ == kNoValue || e_.dtype(mask_) == DType::boolean) return mask_;
    return e_.op("Not", {e_.op("Equal", {mask_, minus_infinity()})});
  }

  // A query that sees no key has weights of zero.
  ValueId softmax(ValueId scores, ValueId seen) {
    if (seen == kNoValue) return e_.op("Softmax", {scores}, {{"axis", int64_t{-1}}});
    const DType type = e_.dtype(scores);
    const ValueId zero = e_.scalar(type, 0.0);
    const ValueId any =
        e_.op("Greater", {e_.reduce("ReduceMax", e_.cast(seen, type), {-1}, true), zero});
    const ValueId safe = e_.where(any, scores, zero);
    return e_.where(any, e_.op("Softmax", {safe}, {{"axis", int64_t{-1}}}), zero);
  }

  ExpandContext& e_;
  bool is_packed_ = false, is_causal_ = false;
  bool shows_scores_ = false;  // or changes them: then they are values of the graph
  ValueId q_, k_, v_;
  ValueId offset_ = kNoValue;   // of the queries' positions among the keys
  ValueId allowed_ = kNoValue;  // bool
  ValueId mask_ = kNoValue;     // bool, or added to the scores
  double scale_ = 1, cap_ = 0;
};

// Pairs of elements of each head turned by the angles of their positions.
std::vector<ValueId> expand_rotary_embedding(ExpandContext& e) {
  ValueId x = e.input(0);
  const bool packed = e.rank(x) == 3;
  if (packed) {
    const int64_t heads = e.attrs().int_("num_heads");
    const int64_t width = e.known_extent(x, 2, "X");
    if (heads < 1 || width % heads != 0) {
      throw InvalidModelError(str("num_heads is ", heads, ", X ", shape_str(e.shape(x))));
    }
    x = e.reshape(x, std::vector<int64_t>{0, 0, heads, width / heads});
  } else {
    if (e.rank(x) != 4) throw ShapeError(str("X is ", shape_str(e.shape(x)), ", of rank 3 or 4"));
    x = e.transpose(x, {0, 2, 1, 3});
  }
  const int64_t size = e.known_extent(x, 3, "X, heads apart,");
  const int64_t given = e.attrs().int_("rotary_embedding_dim");
  const int64_t turned = given == 0 ? size : given;
  if (turned < 0 || turned > size || turned % 2 != 0) {
    throw InvalidModelError(str("rotary_embedding_dim is ", turned, " for heads of ", size));
  }
  const auto angles = [&](size_t index) {
    ValueId cache = e.input(index);
    if (e.has_input(3)) cache = e.op("Gather", {cache, e.input(3)});
    if (e.known_extent(cache, e.shape(cache).size() - 1, "a cache of angles") != turned / 2) {
      throw ShapeError(
          str("a cache is ", shape_str(e.shape(cache)), " for ", turned / 2, " angles"));
    }
    return e.unsqueeze(cache, {2});
  };
  const ValueId cosine = angles(1), sine = angles(2);
  const bool interleaved = e.attrs().int_("interleaved") != 0;
  const ValueId rotated = turned == size ? x : e.slice(x, 3, 0, turned);
  const auto part = [&](int64_t i) {
    if (!interleaved) return e.slice(rotated, 3, i * turned / 2, (i + 1) * turned / 2);
    const ValueId pairs = e.reshape(rotated, std::vector<int64_t>{0, 0, 0, turned / 2, 2});
    return e.squeeze(e.slice(pairs, 4, i, i + 1), {4});
  };
  const ValueId first = part(0), second = part(1);
  const ValueId real = e.sub(e.mul(cosine, first), e.mul(sine, second));
  const ValueId imaginary = e.add(e.mul(sine, first), e.mul(cosine, second));
  ValueId made = interleaved
                     ? e.reshape(e.concat({e.unsqueeze(real, {4}), e.unsqueeze(imaginary, {4})}, 4),
                                 std::vector<int64_t>{0, 0, 0, turned})
                     : e.concat({real, imaginary}, 3);
  if (turned != size) made = e.concat({made, e.slice(x, 3, turned, size)}, 3);
  if (packed) return {e.reshape_like(made, e.input(0))};
  return {e.transpose(made, {0, 2, 1, 3})};
}

}  // namespace

void register_onnx_attention(OpRegistry& registry);
void register_onnx_attention(OpRegistry& registry) {
  registry.add(
      {.name = "Attention",
       .since = 23,
       .summary = "softmax(scale Q K^T + mask) V per head, with keys and values of "
                  "earlier calls, windows and a cap on the scores.",
       .inputs = {{"Q", "T1"},
                  {"K", "T1"},
                  {"V", "T2"},
                  {"attn_mask", "U", Arity::optional},
                  {"past_key", "T1", Arity::optional},
                  {"past_value", "T2", Arity::optional},
                  {"nonpad_kv_seqlen", "int64", Arity::optional}},
       .outputs = {{"Y", "T1"},
                   {"present_key", "T1", Arity::optional},
                   {"present_value", "T2", Arity::optional},
                   {"qk_matmul_output", "T1", Arity::optional}},
       .attrs = {{"is_causal", int64_t{0}},
                 {"kv_num_heads", AttributeKind::int_},
                 {"left_window_size", int64_t{-1}},
                 {"q_num_heads", AttributeKind::int_},
                 {"qk_matmul_output_mode", int64_t{0}},
                 {"right_window_size", int64_t{-1}},
                 {"scale", AttributeKind::float_},
                 {"softcap", 0.0},
                 {"softmax_precision", AttributeKind::int_}},
       .types = {{"T1", kFloatTypes}, {"T2", kFloatTypes}, {"U", kFloatTypes | kBoolTypes}},
       .expand = [](ExpandContext& e) { return OnnxAttention(e).build(); }});
  registry.add(
      {.name = "RotaryEmbedding",
       .since = 23,
       .summary = "Pairs of elements of each head turned by the angles of their positions.",
       .inputs = {{"X", "T"},
                  {"cos_cache", "T"},
                  {"sin_cache", "T"},
                  {"position_ids", "int64", Arity::optional}},
       .outputs = {{"Y", "T"}},
       .attrs = {{"interleaved", int64_t{0}},
                 {"num_heads", int64_t{0}},
                 {"rotary_embedding_dim", int64_t{0}}},
       .types = {{"T", kFloatTypes}},
       .expand = expand_rotary_embedding});
}

}  // namespace ortrain::ops
