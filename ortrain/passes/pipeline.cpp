// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/pipeline.h"

#include <chrono>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"
#include "ortrain/base/log.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/accumulate_products.h"
#include "ortrain/passes/eliminate_identity.h"
#include "ortrain/passes/fold_known_shapes.h"
#include "ortrain/passes/fuse_classifier_loss.h"
#include "ortrain/passes/fuse_elementwise.h"
#include "ortrain/passes/merge_attention_heads.h"
#include "ortrain/passes/merge_common.h"
#include "ortrain/passes/pass.h"

namespace ortrain {
namespace {

struct Stage {
  std::string name;
  std::vector<Pass> passes;
};

// The order of all rewrites stands here and nowhere else.
const std::vector<Stage>& stages() {
  static const auto* const all = new std::vector<Stage>{
      {"simplify",
       {fold_known_shapes(), eliminate_identity(), merge_common(), merge_attention_heads(),
        eliminate_identity()}},
      {"fuse",
       {fold_known_shapes(), eliminate_stop_gradient(), eliminate_identity(), merge_common(),
        accumulate_products(), fuse_classifier_loss(), fuse_elementwise()}},
  };
  return *all;
}

}  // namespace

bool is_disabled(const std::string& pass) {
  const std::string names = "," + flag("ORTRAIN_DISABLE_PASSES") + ",";
  return names.find("," + pass + ",") != std::string::npos;
}

std::vector<PassResult> run_pipeline(Graph& graph, const std::string& stage_name) {
  using Clock = std::chrono::steady_clock;
  for (const Stage& stage : stages()) {
    if (stage.name != stage_name) continue;
    const bool verify_each = flag_is_on("ORTRAIN_VERIFY");
    std::vector<PassResult> results;
    for (const Pass& pass : stage.passes) {
      if (is_disabled(pass.name)) continue;
      const Clock::time_point start = Clock::now();
      const size_t before = graph.order().size();
      PassResult result{.name = pass.name};
      with_context("pass " + pass.name + ": ", [&] {
        result.changed = pass.run(graph);
        if (result.changed) {
          graph.sort();
          graph.remove_dead_nodes();
          if (verify_each) verify(graph);
        }
      });
      result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
      log_line("passes", str(stage.name, "/", pass.name, ": ", before, " -> ", graph.order().size(),
                             " nodes, ", result.seconds * 1e3, " ms"));
      results.push_back(std::move(result));
    }
    return results;
  }
  throw InternalError(str("there is no pass stage '", stage_name, "'"));
}

std::vector<PassInfo> all_passes() {
  std::vector<PassInfo> result;
  for (const Stage& stage : stages()) {
    for (const Pass& pass : stage.passes) result.push_back({pass.name, stage.name, pass.summary});
  }
  // Makes a second graph, for the calls that it fits.
  result.push_back({"remove_padding", "rows",
                    "Layers compute the rows that masks and outputs need, padding goes."});
  return result;
}

}  // namespace ortrain
