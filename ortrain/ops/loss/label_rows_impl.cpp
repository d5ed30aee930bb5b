// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ops/loss/label_rows.h"

namespace ortrain::ops {

void LabelRows::read_labels(const void* labels, int64_t* out) const {
  dispatch_index(label_type, [&](auto tag) {
    using I = typename decltype(tag)::type;
    const I* in = static_cast<const I*>(labels);
    for (int64_t i = 0; i < count(); ++i) {
      const int64_t label = in[i];
      if (ignore_index && label == *ignore_index) {
        out[i] = -1;
      } else if (label < 0 || label >= split.size) {
        throw IndexError(str(context, "label ", label, " at position ", i, " is outside of [0, ",
                             split.size, ")",
                             ignore_index ? str(" and is not the ignored ", *ignore_index) : ""));
      } else {
        out[i] = label;
      }
    }
  });
}

}  // namespace ortrain::ops
