// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/testing/case.h"

namespace ortrain::testing {

void register_group_norm(CaseRegistry& cases) {
  struct Form {
    std::string name;
    Dims dims;
    int64_t groups;
  };
  for (const Form& f :
       {Form{"one", {1, 1, 1}, 1}, Form{"two_groups", {2, 4, 7}, 2}, Form{"image", {2, 6, 3, 3}, 3},
        Form{"instance", {2, 3, 8}, 3}, Form{"all_channels", {3, 4, 5}, 1},
        Form{"no_space", {3, 8}, 2}, Form{"empty_batch", {0, 4, 3}, 2},
        Form{"larger", {3, 16, 17, 9}, 4}, Form{"parts", {1, 4, 100, 64}, 2}}) {
    const bool small = num_elements(f.dims) < 150;
    const Attributes attributes{{"num_groups", f.groups}, {"epsilon", 1e-3}};
    const CaseInput x = CaseInput::normal(f.dims);
    const CaseInput parameter = CaseInput::normal({f.dims[1]});
    for (int affine = 0; affine < 3; ++affine) {
      std::vector<CaseInput> inputs{x};
      for (int i = 0; i < affine; ++i) inputs.push_back(parameter);
      cases.add({.op = "GroupNormalization",
                 .name = f.name + "_" + std::to_string(affine),
                 .inputs = inputs,
                 .attributes = attributes,
                 .check_gradient = small});
    }
    for (const bool scale : {false, true}) {
      std::vector<CaseInput> inputs{x, x};
      if (scale) inputs.push_back(parameter);
      cases.add({.op = "ortrain::GroupNormalizationGrad",
                 .name = f.name + (scale ? "_scale" : ""),
                 .inputs = inputs,
                 .attributes = attributes,
                 .outputs = 3,
                 .tolerance = small ? 2e-5 : 2e-4});
    }
  }
  cases.add({.op = "GroupNormalization",
             .name = "refuses_groups",
             .inputs = {CaseInput::normal({2, 4, 3})},
             .attributes = {{"num_groups", int64_t{3}}},
             .refusal = "do not split into 3 groups"});
  cases.add({.op = "GroupNormalization",
             .name = "refuses_scale",
             .inputs = {CaseInput::normal({2, 4, 3}), CaseInput::normal({2})},
             .attributes = {{"num_groups", int64_t{2}}},
             .refusal = "does not fit 4 channels"});
}

}  // namespace ortrain::testing
