// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

struct Form {
  std::string name;
  Dims q, k, v;
  Attributes attributes = {};
  CaseInput mask = CaseInput::none();
  bool dropout = false;
  std::vector<double> offsets = {};
};

CaseInput seed() { return CaseInput::literal(DType::i64, {}, {1234567}); }

CaseInput bool_mask(Dims dims) {
  return CaseInput::integers(DType::boolean, std::move(dims), 0, 2);
}

// Two batch entries: keys of the first half and a few others are seen; keys at the end are.
CaseInput padding(int64_t keys) {
  std::vector<double> sees;
  for (int64_t j = 0; j < 2 * keys; ++j) {
    sees.push_back(j < keys ? j < keys / 4 || j == keys - 70 : j >= 2 * keys - 3 ? 1 : 0);
  }
  return CaseInput::literal(DType::boolean, {2, 1, 1, keys}, std::move(sees));
}

CaseInput all_seen(const Dims& dims) {
  return CaseInput::literal(DType::boolean, dims,
                            std::vector<double>(static_cast<size_t>(num_elements(dims)), 1));
}

std::vector<Form> forms() {
  std::vector<Form> list;
  auto add = [&](Form form) { list.push_back(std::move(form)); };
  add({"one", {1, 1, 1, 1}, {1, 1, 1, 1}, {1, 1, 1, 1}});
  add({"self", {2, 3, 7, 8}, {2, 3, 7, 8}, {2, 3, 7, 8}});
  add({"cross", {2, 2, 5, 8}, {2, 2, 9, 8}, {2, 2, 9, 3}});
  add({"causal", {1, 2, 9, 4}, {1, 2, 9, 4}, {1, 2, 9, 4}, {{"is_causal", int64_t{1}}}});
  add({"causal_more_keys", {1, 1, 4, 4}, {1, 1, 7, 4}, {1, 1, 7, 4}, {{"is_causal", int64_t{1}}}});
  add({"causal_more_queries",
       {1, 1, 7, 4},
       {1, 1, 4, 4},
       {1, 1, 4, 4},
       {{"is_causal", int64_t{1}}}});
  add({"scale", {1, 1, 5, 4}, {1, 1, 5, 4}, {1, 1, 5, 4}, {{"scale", 0.1}}});
  add({"grouped_heads", {2, 4, 5, 4}, {2, 2, 6, 4}, {2, 2, 6, 4}});
  add({"packed", {2, 5, 12}, {2, 7, 12}, {2, 7, 6}, {{"q_num_heads", int64_t{3}}}});
  add({"packed_grouped",
       {2, 5, 16},
       {2, 5, 8},
       {2, 5, 8},
       {{"q_num_heads", int64_t{4}}, {"kv_num_heads", int64_t{2}}}});
  add({"no_queries", {1, 2, 0, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}});
  add({"no_batch", {0, 2, 3, 4}, {0, 2, 3, 4}, {0, 2, 3, 4}});
  add({"no_keys", {1, 2, 3, 4}, {1, 2, 0, 4}, {1, 2, 0, 4}});
  add({"grouped_heads_of_64",
       {1, 4, 70, 64},
       {1, 2, 70, 64},
       {1, 2, 70, 64},
       {{"is_causal", int64_t{1}}}});
  const Dims q{2, 2, 5, 4};
  const Dims k{2, 2, 9, 4};
  add({"bool_mask", q, k, k, {}, bool_mask({2, 2, 5, 9})});
  add({"key_padding", q, k, k, {}, bool_mask({2, 1, 1, 9})});
  add({"bool_rows", q, k, k, {}, bool_mask({5, 1})});
  add({"float_mask", q, k, k, {}, CaseInput::normal({2, 2, 5, 9})});
  add({"float_mask_keys", q, k, k, {}, CaseInput::normal({9})});
  add({"float_mask_heads", q, k, k, {}, CaseInput::normal({1, 2, 5, 9})});
  add({"float_mask_batch", q, k, k, {}, CaseInput::normal({2, 1, 1, 9})});
  add({"float_mask_matrix", q, k, k, {}, CaseInput::normal({5, 9})});
  add({"float_mask_rows", q, k, k, {}, CaseInput::normal({2, 1, 5, 1})});
  add({"float_mask_scalar", q, k, k, {}, CaseInput::normal({})});
  add({"dropout", q, k, k, {{"dropout", 0.3}, {"stream", int64_t{5}}}, CaseInput::none(), true});
  add({"dropout_all", q, k, k, {{"dropout", 1.0}}, CaseInput::none(), true});
  add({"dropout_causal_mask",
       {1, 2, 9, 4},
       {1, 2, 9, 4},
       {1, 2, 9, 4},
       {{"dropout", 0.2}, {"is_causal", int64_t{1}}},
       CaseInput::normal({1, 2, 9, 9}),
       true});
  const Dims rows{1, 17, 12};
  const Attributes heads{{"q_num_heads", int64_t{3}}};
  add({"sequences", rows, rows, rows, heads, CaseInput::none(), false, {0, 5, 5, 6, 17}});
  add({"sequences_rest", rows, rows, rows, heads, CaseInput::none(), false, {0, 9, 13}});
  add({"sequences_none", rows, rows, rows, heads, CaseInput::none(), false, {0}});
  add({"sequences_grouped_causal_dropout",
       {1, 9, 16},
       {1, 9, 8},
       {1, 9, 8},
       {{"q_num_heads", int64_t{4}},
        {"kv_num_heads", int64_t{2}},
        {"is_causal", int64_t{1}},
        {"dropout", 0.2}},
       CaseInput::none(),
       true,
       {0, 3, 9}});
  add({"sequences_blocks",
       {1, 700, 48},
       {1, 700, 48},
       {1, 700, 48},
       {{"q_num_heads", int64_t{2}}, {"dropout", 0.1}},
       CaseInput::none(),
       true,
       {0, 90, 400, 690}});
  add({"blocks",
       {1, 2, 150, 32},
       {1, 2, 300, 32},
       {1, 2, 300, 40},
       {{"dropout", 0.1}},
       CaseInput::normal({1, 2, 150, 300}),
       true});
  // Keys that are a multiple of those of a draw.
  add({"dropout_even_keys",
       {2, 4, 70, 32},
       {2, 2, 200, 32},
       {2, 2, 200, 40},
       {{"dropout", 0.3}, {"stream", (int64_t{1} << 33) + 5}},
       CaseInput::none(),
       true});
  add({"dropout_even_keys_causal",
       {1, 2, 264, 96},
       {1, 2, 264, 96},
       {1, 2, 264, 96},
       {{"dropout", 0.1}, {"is_causal", int64_t{1}}},
       CaseInput::none(),
       true});
  add({"dropout_even_keys_wide",
       {1, 1, 40, 160},
       {1, 1, 72, 160},
       {1, 1, 72, 160},
       {{"dropout", 0.5}},
       bool_mask({40, 72}),
       true});
  // Heads as wide as tiles, for which there are kernels with fewer branches.
  add({"whole_tiles_dropout",
       {1, 4, 72, 64},
       {1, 2, 200, 64},
       {1, 2, 200, 64},
       {{"dropout", 0.3}, {"stream", int64_t{9}}},
       CaseInput::none(),
       true});
  add({"whole_tiles_causal",
       {1, 2, 131, 64},
       {1, 2, 131, 64},
       {1, 2, 131, 64},
       {{"is_causal", int64_t{1}}}});
  add({"whole_tiles_causal_dropout_packed",
       {2, 136, 256},
       {2, 136, 128},
       {2, 136, 128},
       {{"q_num_heads", int64_t{4}},
        {"kv_num_heads", int64_t{2}},
        {"is_causal", int64_t{1}},
        {"dropout", 0.1}},
       CaseInput::none(),
       true});
  add({"wide_whole_tiles_dropout",
       {1, 1, 100, 128},
       {1, 1, 72, 128},
       {1, 1, 72, 128},
       {{"dropout", 0.5}},
       CaseInput::none(),
       true});
  add({"whole_tiles_tiny_scale",
       {1, 1, 70, 64},
       {1, 1, 70, 64},
       {1, 1, 70, 64},
       {{"is_causal", int64_t{1}}, {"scale", 1e-50}}});
  add({"wide_whole_tiles_causal",
       {1, 2, 99, 128},
       {1, 1, 99, 128},
       {1, 1, 99, 128},
       {{"is_causal", int64_t{1}}}});
  add({"blocks_packed_causal",
       {2, 300, 48},
       {2, 300, 48},
       {2, 300, 48},
       {{"q_num_heads", int64_t{2}}, {"is_causal", int64_t{1}}}});
  // Wide heads, more than one tile of queries and keys, tiles that are not full.
  add({"wide_heads",
       {1, 2, 40, 72},
       {1, 1, 70, 72},
       {1, 1, 70, 96},
       {{"is_causal", int64_t{1}}, {"dropout", 0.2}},
       CaseInput::none(),
       true});
  add({"wider_heads", {1, 1, 70, 136}, {1, 1, 40, 136}, {1, 1, 40, 160}});
  add({"widest_heads", {1, 1, 5, 260}, {1, 1, 40, 260}, {1, 1, 40, 300}});
  add({"uneven_rows",
       {1, 1, 131, 9},
       {1, 1, 67, 9},
       {1, 1, 67, 33},
       {{"dropout", 0.5}},
       CaseInput::none(),
       true});
  add({"padding_blocks", {2, 2, 70, 16}, {2, 1, 200, 16}, {2, 1, 200, 16}, {}, padding(200)});
  add({"causal_padding_blocks",
       {2, 2, 200, 16},
       {2, 1, 200, 16},
       {2, 1, 200, 16},
       {{"is_causal", int64_t{1}}},
       padding(200)});
  // Masks of keys over whole tiles, of which some are hidden and some are seen as a whole.
  add({"whole_tiles_padding", {2, 2, 70, 64}, {2, 1, 200, 64}, {2, 1, 200, 64}, {}, padding(200)});
  add({"whole_tiles_padding_causal_dropout",
       {2, 130, 128},
       {2, 130, 64},
       {2, 130, 64},
       {{"q_num_heads", int64_t{2}},
        {"kv_num_heads", int64_t{1}},
        {"is_causal", int64_t{1}},
        {"dropout", 0.2}},
       padding(130),
       true});
  add({"whole_tiles_seen",
       {1, 1, 65, 64},
       {1, 1, 129, 64},
       {1, 1, 129, 64},
       {},
       all_seen({1, 129})});
  add({"whole_tiles_one_column",
       {2, 1, 66, 64},
       {2, 1, 80, 64},
       {2, 1, 80, 64},
       {},
       CaseInput::literal(DType::boolean, {2, 1, 1, 1}, {1, 0})});
  add({"wide_whole_tiles_padding",
       {2, 1, 70, 128},
       {2, 1, 200, 128},
       {2, 1, 200, 128},
       {},
       padding(200)});
  add({"bool_mask_blocks",
       {1, 2, 70, 16},
       {1, 2, 130, 16},
       {1, 2, 130, 16},
       {},
       bool_mask({2, 70, 130})});
  add({"float_mask_blocks",
       {2, 2, 70, 24},
       {2, 1, 130, 24},
       {2, 1, 130, 24},
       {},
       CaseInput::normal({2, 2, 70, 130})});
  add({"float_mask_blocks_causal_dropout",
       {1, 2, 130, 64},
       {1, 2, 130, 64},
       {1, 2, 130, 64},
       {{"is_causal", int64_t{1}}, {"dropout", 0.3}},
       CaseInput::normal({2, 130, 130}),
       true});
  add({"float_mask_keys_blocks",
       {2, 2, 70, 8},
       {2, 2, 130, 8},
       {2, 2, 130, 8},
       {},
       CaseInput::normal({130})});
  add({"float_mask_rows_blocks",
       {1, 2, 70, 8},
       {1, 2, 130, 8},
       {1, 2, 130, 8},
       {},
       CaseInput::normal({2, 70, 1})});
  return list;
}

// Shapes of out and logsumexp.
std::pair<Dims, Dims> results_of(const Form& f) {
  if (f.q.size() == 4) {
    Dims out = f.q;
    out[3] = f.v[3];
    return {out, {f.q[0], f.q[1], f.q[2]}};
  }
  const int64_t heads = std::get<int64_t>(f.attributes.at("q_num_heads"));
  const auto kv = f.attributes.find("kv_num_heads");
  const int64_t kv_heads = kv == f.attributes.end() ? heads : std::get<int64_t>(kv->second);
  return {{f.q[0], f.q[1], f.v[2] / kv_heads * heads}, {f.q[0], heads, f.q[1]}};
}

// Seed and offsets, behind the mask.
void append_options(const Form& f, std::vector<CaseInput>& inputs) {
  if (!f.dropout && f.offsets.empty()) return;
  inputs.push_back(f.dropout ? seed() : CaseInput::none());
  if (f.offsets.empty()) return;
  const Dims dims{static_cast<int64_t>(f.offsets.size())};
  inputs.push_back(CaseInput::literal(DType::i64, dims, f.offsets));
}

}  // namespace

void register_attention(CaseRegistry& cases) {
  for (const Form& f : forms()) {
    const bool small = num_elements(f.k) < 200;
    std::vector<CaseInput> inputs{CaseInput::normal(f.q), CaseInput::normal(f.k),
                                  CaseInput::normal(f.v), f.mask};
    append_options(f, inputs);
    cases.add({.op = "ortrain::Attention",
               .name = f.name,
               .inputs = inputs,
               .attributes = f.attributes,
               .outputs = 2,
               // Rows that repeat another have no gradient by definition.
               .check_gradient = small && (f.offsets.empty() || f.offsets.back() == f.q[1]),
               .tolerance = 5e-5});

    const auto [out, lse] = results_of(f);
    const bool has_float_mask = f.mask.fill == CaseInput::Fill::normal;
    for (const DType type : {DType::f32, DType::f64}) {
      // Small problems: large enough that the probabilities stay below 1. Larger ones: such that
      // the sums are large enough to tell mistakes from rounding.
      CaseInput logsumexp = small ? CaseInput::uniform(lse, 8, 9) : CaseInput::uniform(lse, 5, 6);
      logsumexp.dtype = type;
      std::vector<CaseInput> grad_inputs{CaseInput::normal(out), inputs[0], inputs[1], inputs[2],
                                         CaseInput::normal(out), logsumexp, f.mask};
      append_options(f, grad_inputs);
      cases.add({.op = "ortrain::AttentionGrad",
                 .name = f.name + "_" + std::string(name_of(type)),
                 .inputs = grad_inputs,
                 .attributes = f.attributes,
                 .outputs = has_float_mask ? size_t{4} : size_t{3},
                 .types = type == DType::f64 ? DTypeSet{DType::f64}
                                             : DTypeSet{DType::f32, DType::f16, DType::bf16},
                 .tolerance = 1e-4});
    }
  }

  auto refuse = [&](std::string name, std::vector<CaseInput> inputs, Attributes attributes,
                    std::string why) {
    cases.add({.op = "ortrain::Attention",
               .name = "refuses_" + name,
               .inputs = std::move(inputs),
               .attributes = std::move(attributes),
               .types = {DType::f32},
               .refusal = std::move(why)});
  };
  const CaseInput x = CaseInput::normal({1, 2, 3, 4});
  refuse("head_sizes", {x, CaseInput::normal({1, 2, 3, 5}), x}, {}, "head sizes of q and k differ");
  refuse("heads", {CaseInput::normal({1, 3, 3, 4}), x, x}, {}, "cannot share");
  refuse("rows", {x, x, CaseInput::normal({1, 2, 5, 4})}, {}, "rows of k and v differ");
  refuse("mask_shape", {x, x, x, bool_mask({4, 3})}, {}, "does not broadcast");
  refuse("mask_type", {x, x, x, CaseInput::literal(DType::f64, {}, {0})}, {}, "expected bool or");
  refuse("seedless_dropout", {x, x, x}, {{"dropout", 0.5}}, "needs the input 'seed'");
  const CaseInput packed = CaseInput::normal({1, 3, 8});
  refuse("packed_without_heads", {packed, packed, packed}, {}, "need the attribute q_num_heads");
  const Attributes two{{"q_num_heads", int64_t{2}}};
  auto offsets = [](std::vector<double> values) {
    const Dims dims{static_cast<int64_t>(values.size())};
    return CaseInput::literal(DType::i64, dims, std::move(values));
  };
  const CaseInput none = CaseInput::none();
  refuse("falling_offsets", {packed, packed, packed, none, none, offsets({0, 2, 1})}, two,
         "'offsets' has 1 at 2");
  refuse("offsets_behind_rows", {packed, packed, packed, none, none, offsets({0, 4})}, two,
         "'offsets' has 4 at 1");
  refuse("offsets_with_mask", {packed, packed, packed, bool_mask({3, 3}), none, offsets({0, 3})},
         two, "and no mask");
  refuse("offsets_of_nothing", {packed, packed, packed, none, none, offsets({})}, two,
         "one entry more");
  refuse("uneven_heads", {packed, packed, packed}, {{"q_num_heads", int64_t{3}}}, "no multiple of");
}

}  // namespace ortrain::testing
