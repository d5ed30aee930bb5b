// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {
namespace {

struct Form {
  std::string name;
  Dims scores;
};

const std::vector<Form> kForms = {{"one_class", {4, 1}},     {"classes_7", {5, 7}},
                                  {"classes_8", {3, 8}},     {"classes_17", {9, 17}},
                                  {"vector", {9}},           {"image", {2, 5, 3, 4}},
                                  {"sequence", {2, 7, 9}},   {"one_pixel", {3, 6, 1}},
                                  {"vocabulary", {6, 1000}}, {"pixels", {2, 9, 75}},
                                  {"ragged", {9, 1003}},     {"ragged_pairs", {5, 1026}}};

Dims labels_of(Dims scores) {
  scores.erase(scores.begin() + (scores.size() == 1 ? 0 : 1));
  return scores;
}

int64_t classes_of(const Dims& scores) { return scores.size() == 1 ? scores[0] : scores[1]; }

CaseInput with_type(CaseInput input, DType type) {
  input.dtype = type;
  return input;
}

void add_classifier(CaseRegistry& cases, std::string name, Dims x, int64_t classes,
                    Attributes attributes, bool with_base, size_t outputs) {
  const int64_t rows = num_elements(Dims(x.begin(), x.end() - 1));
  const std::string reduction = std::get<std::string>(attributes.at("reduction"));
  const bool full = attributes.contains("full_loss");
  for (const DType type : {DType::f32, DType::f64}) {
    const CaseInput dloss = CaseInput::normal(reduction == "none" ? Dims{rows} : Dims{});
    std::vector<CaseInput> inputs{full ? with_type(dloss, type) : dloss,
                                  CaseInput::normal({rows, classes}),
                                  CaseInput::integers(DType::i64, {rows}, 0, classes),
                                  with_type(CaseInput::uniform({rows}, 5, 6), type),
                                  CaseInput::normal(x),
                                  CaseInput::normal({classes, x.back()})};
    if (with_base) inputs.push_back(CaseInput::normal({classes, x.back()}));
    cases.add({.op = "ortrain::ClassifierLossGrad",
               .name = name + "_" + std::string(name_of(type)),
               .inputs = inputs,
               .attributes = attributes,
               .outputs = outputs,
               .types = type == DType::f64 ? DTypeSet{DType::f64}
                                           : DTypeSet{DType::f32, DType::f16, DType::bf16},
               .tolerance = 5e-5});
  }
}

void add_classifiers(CaseRegistry& cases) {
  const Attributes mean{{"reduction", std::string("mean")}};
  Attributes ignoring = mean;
  ignoring["ignore_index"] = int64_t{1};
  Attributes smooth = ignoring;
  smooth["label_smoothing"] = 0.2;
  add_classifier(cases, "mean", {7, 5}, 9, mean, false, 3);
  add_classifier(cases, "base", {2, 3, 5}, 9, mean, true, 3);
  add_classifier(cases, "no_bias", {7, 5}, 9, mean, true, 2);
  add_classifier(cases, "ignoring", {17, 8}, 3, ignoring, false, 3);
  add_classifier(cases, "ignoring_smooth", {17, 8}, 3, smooth, true, 3);
  add_classifier(cases, "none", {9, 4}, 2, {{"reduction", std::string("none")}}, false, 3);
  for (const std::string reduction : {"mean", "none"}) {
    const Attributes full{{"reduction", reduction}, {"full_loss", int64_t{1}}};
    add_classifier(cases, "full_loss_" + reduction, {2, 5, 4}, 9, full, true, 3);
  }
  add_classifier(cases, "sum", {9, 1}, 2, {{"reduction", std::string("sum")}}, false, 3);
  Attributes all = mean;
  all["ignore_index"] = int64_t{0};
  add_classifier(cases, "all_ignored", {6, 4}, 1, all, false, 3);
  add_classifier(cases, "all_ignored_base", {6, 4}, 1, all, true, 3);
  add_classifier(cases, "no_rows", {0, 4}, 3, mean, false, 3);
  add_classifier(cases, "no_rows_base", {0, 4}, 3, mean, true, 3);
  add_classifier(cases, "chunks", {1100, 6}, 5, ignoring, true, 3);
  add_classifier(cases, "chunks_all", {1100, 6}, 5, mean, false, 3);
  // What a device does with long rows, rows not of whole vectors, and more rows than its chunks.
  add_classifier(cases, "vocabulary", {70, 3}, 301, ignoring, true, 3);
  add_classifier(cases, "vocabulary_ragged", {11, 3}, 1003, ignoring, true, 3);
  add_classifier(cases, "vocabulary_ragged_smooth", {9, 2}, 1026, smooth, false, 3);
  add_classifier(cases, "vocabulary_of_vectors", {9, 16}, 1040, smooth, false, 3);
  add_classifier(cases, "device_chunks", {2070, 2}, 3, ignoring, false, 3);
  add_classifier(cases, "device_chunks_base", {4200, 1}, 2, mean, true, 3);
  const auto refuse = [&](std::string name, Dims x, Dims weight, CaseInput labels,
                          std::string why) {
    cases.add({.op = "ortrain::ClassifierLossGrad",
               .name = "refuses_" + name,
               .inputs = {CaseInput::normal({}), CaseInput::normal({3, 5}), std::move(labels),
                          CaseInput::normal({3}), CaseInput::normal(std::move(x)),
                          CaseInput::normal(std::move(weight))},
               .attributes = mean,
               .outputs = 3,
               .types = {DType::f32},
               .refusal = std::move(why)});
  };
  const CaseInput labels = CaseInput::literal(DType::i64, {3}, {0, 1, 2});
  refuse("rows", {4, 2}, {5, 2}, labels, "do not make logits");
  refuse("classes", {3, 2}, {6, 2}, labels, "do not make logits");
  refuse("features", {3, 2}, {5, 3}, labels, "do not make logits");
  refuse("label", {3, 2}, {5, 2}, CaseInput::literal(DType::i64, {3}, {0, 5, 2}),
         "label 5 at position 1");
}

void add_form(CaseRegistry& cases, const Form& f) {
  const Dims labels = labels_of(f.scores);
  const int64_t classes = classes_of(f.scores);
  const bool small = num_elements(f.scores) < 200;
  const CaseInput x = CaseInput::normal(f.scores);
  const CaseInput y = CaseInput::integers(DType::i64, labels, 0, classes);
  const CaseInput y32 = CaseInput::integers(DType::i32, labels, 0, classes);
  for (const std::string reduction : {"mean", "sum", "none"}) {
    for (int variant = 0; variant < 4; ++variant) {
      const bool weighted = variant & 1;
      const bool smooth = variant & 2;
      // All labels ignored: NaN, and then finite differences of NaN.
      const bool ignoring = weighted && classes > 1 && num_elements(labels) > 1;
      Attributes attributes{{"reduction", reduction}};
      if (ignoring) attributes["ignore_index"] = int64_t{0};
      Attributes own = attributes;
      if (smooth) own["label_smoothing"] = 0.2;
      std::vector<CaseInput> inputs{x, weighted ? y32 : y};
      if (weighted) inputs.push_back(with_type(CaseInput::positive({classes}), DType::undefined));
      const std::string name =
          f.name + "_" + reduction + (weighted ? "_weighted" : "") + (smooth ? "_smooth" : "");
      cases.add({.op = "ortrain::CrossEntropy",
                 .name = name,
                 .inputs = inputs,
                 .attributes = own,
                 .outputs = 2,
                 // Class weights have no gradient rule.
                 .check_gradient = small && !weighted});
      const Dims loss = reduction == "none" ? labels : Dims{};
      for (const DType type : {DType::f32, DType::f64}) {
        std::vector<CaseInput> grad_inputs{CaseInput::normal(loss), x, inputs[1],
                                           variant == 0 || variant == 3
                                               ? CaseInput::none()
                                               : with_type(CaseInput::uniform(labels, 5, 6), type)};
        if (weighted) grad_inputs.push_back(inputs[2]);
        cases.add({.op = "ortrain::CrossEntropyGrad",
                   .name = name + "_" + std::string(name_of(type)),
                   .inputs = grad_inputs,
                   .attributes = own,
                   .types = type == DType::f64 ? DTypeSet{DType::f64}
                                               : DTypeSet{DType::f32, DType::f16, DType::bf16},
                   .tolerance = small ? 2e-5 : 1e-4});
      }
      if (smooth) continue;
      for (const size_t outputs : {1, 2}) {
        cases.add({.op = "SoftmaxCrossEntropyLoss",
                   .name = name + (outputs == 2 ? "_log_prob" : ""),
                   .inputs = inputs,
                   .attributes = attributes,
                   .outputs = outputs,
                   .check_gradient = small && !weighted,
                   .gradient_outputs =
                       outputs == 2 ? std::vector<size_t>{0, 1} : std::vector<size_t>{0}});
      }
      cases.add({.op = "NegativeLogLikelihoodLoss",
                 .name = name,
                 .inputs = inputs,
                 .attributes = attributes,
                 .check_gradient = small && !weighted});
      std::vector<CaseInput> nll_inputs{CaseInput::normal(loss), inputs[1],
                                        CaseInput::int64s(f.scores)};
      if (weighted) nll_inputs.push_back(inputs[2]);
      cases.add({.op = "ortrain::NegativeLogLikelihoodLossGrad",
                 .name = name,
                 .inputs = nll_inputs,
                 .attributes = attributes,
                 .check_gradient = small && !weighted});
    }
  }
}

}  // namespace

void register_loss(CaseRegistry& cases) {
  add_classifiers(cases);
  for (const Form& form : kForms) add_form(cases, form);
  for (const Form& form : {Form{"many_labels", {5000, 3}},
                           {"long_rows", {2, 20001}},
                           {"long_even_rows", {2, 20000}}}) {
    const CaseInput scores = CaseInput::normal(form.scores);
    const CaseInput labels =
        CaseInput::integers(DType::i64, labels_of(form.scores), 0, classes_of(form.scores));
    const Attributes smooth{{"label_smoothing", 0.2}, {"ignore_index", int64_t{1}}};
    cases.add({.op = "ortrain::CrossEntropy",
               .name = form.name,
               .inputs = {scores, labels},
               .attributes = smooth,
               .outputs = 2,
               .check_gradient = false});
    cases.add({.op = "ortrain::CrossEntropyGrad",
               .name = form.name,
               .inputs = {CaseInput::normal({}), scores, labels},
               .attributes = smooth});
    cases.add({.op = "SoftmaxCrossEntropyLoss",
               .name = form.name,
               .inputs = {scores, labels},
               .outputs = 2,
               .check_gradient = false});
  }

  const CaseInput x = CaseInput::normal({3, 5});
  auto labels = [](std::vector<double> values) {
    return CaseInput::literal(DType::i64, {3}, std::move(values));
  };
  // The default of ignore_index, and ignored rows in the gradient.
  cases.add({.op = "ortrain::CrossEntropy",
             .name = "ignored_rows",
             .inputs = {x, labels({1, -100, 4})},
             .outputs = 2});
  cases.add({.op = "ortrain::CrossEntropy",
             .name = "all_ignored_mean",
             .inputs = {x, labels({-100, -100, -100})},
             .outputs = 2,
             .check_gradient = false});
  cases.add({.op = "ortrain::CrossEntropy",
             .name = "all_ignored_sum",
             .inputs = {x, labels({-100, -100, -100})},
             .attributes = {{"reduction", std::string("sum")}},
             .outputs = 2});
  cases.add({.op = "ortrain::CrossEntropy",
             .name = "no_rows_sum",
             .inputs = {CaseInput::normal({0, 5}), CaseInput::integers(DType::i64, {0}, 0, 1)},
             .attributes = {{"reduction", std::string("sum")}},
             .outputs = 2});

  for (const std::string op :
       {"ortrain::CrossEntropy", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"}) {
    cases.add({.op = op,
               .name = "refuses_large_label",
               .inputs = {x, labels({0, 5, 1})},
               .refusal = "label 5 at position 1 is outside of [0, 5)"});
    cases.add({.op = op,
               .name = "refuses_negative_label",
               .inputs = {x, labels({0, 1, -1})},
               .refusal = "label -1 at position 2 is outside of [0, 5)"});
    cases.add({.op = op,
               .name = "refuses_label_shape",
               .inputs = {x, CaseInput::integers(DType::i64, {4}, 0, 5)},
               .refusal = "do not fit scores"});
    cases.add({.op = op,
               .name = "refuses_weight_shape",
               .inputs = {x, labels({0, 1, 2}), CaseInput::positive({4})},
               .refusal = "class weights of shape"});
    cases.add({.op = op,
               .name = "refuses_reduction",
               .inputs = {x, labels({0, 1, 2})},
               .attributes = {{"reduction", std::string("median")}},
               .refusal = "not none, mean or sum"});
  }
  // The loss in float, whatever the logits are.
  for (const std::string reduction : {"mean", "sum", "none"}) {
    for (const bool weighted : {false, true}) {
      for (const Dims& scores : {Dims{3, 5}, Dims{7, 33}, Dims{2, 5, 3}}) {
        const CaseInput y =
            CaseInput::integers(DType::i64, labels_of(scores), 0, classes_of(scores));
        const CaseInput weight =
            with_type(CaseInput::positive({classes_of(scores)}), DType::undefined);
        const Attributes attributes{
            {"reduction", reduction}, {"full_loss", int64_t{1}}, {"label_smoothing", 0.1}};
        const std::string name = "full_loss_" + reduction + (weighted ? "_weighted_" : "_") +
                                 std::to_string(scores.size()) + "_" + std::to_string(scores[0]);
        std::vector<CaseInput> inputs{CaseInput::normal(scores), y};
        if (weighted) inputs.push_back(weight);
        cases.add({.op = "ortrain::CrossEntropy",
                   .name = name,
                   .inputs = inputs,
                   .attributes = attributes,
                   .outputs = 2,
                   .check_gradient = !weighted});
        const Dims loss = reduction == "none" ? labels_of(scores) : Dims{};
        std::vector<CaseInput> grad_inputs{
            with_type(CaseInput::normal(loss), DType::f32), CaseInput::normal(scores), y,
            with_type(CaseInput::uniform(labels_of(scores), 5, 6), DType::f32)};
        if (weighted) grad_inputs.push_back(weight);
        cases.add({.op = "ortrain::CrossEntropyGrad",
                   .name = name,
                   .inputs = grad_inputs,
                   .attributes = attributes,
                   .types = DTypeSet{DType::f32, DType::f16, DType::bf16},
                   .tolerance = 2e-5});
      }
    }
  }
  cases.add({.op = "ortrain::CrossEntropyGrad",
             .name = "refuses_dloss_of_another_type",
             .inputs = {CaseInput::normal({}), x, labels({0, 1, 2})},
             .attributes = {{"full_loss", int64_t{1}}},
             .types = DTypeSet{DType::f16, DType::bf16},
             .refusal = "expected float32"});
  cases.add({.op = "ortrain::CrossEntropy",
             .name = "refuses_full_loss",
             .inputs = {x, labels({0, 1, 2})},
             .attributes = {{"full_loss", int64_t{2}}},
             .refusal = "'full_loss' is 2"});
  cases.add({.op = "ortrain::CrossEntropyGrad",
             .name = "refuses_large_label",
             .inputs = {CaseInput::normal({}), x, labels({0, 5, 1})},
             .refusal = "label 5 at position 1"});
  cases.add({.op = "ortrain::CrossEntropy",
             .name = "refuses_smoothing",
             .inputs = {x, labels({0, 1, 2})},
             .attributes = {{"label_smoothing", 1.5}},
             .refusal = "'label_smoothing' is 1.5"});
}

}  // namespace ortrain::testing
