// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/passes/pipeline.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <mutex>
#include <span>

#include "ortrain/base/error.h"
#include "ortrain/base/flags.h"
#include "ortrain/base/log.h"
#include "ortrain/ir/verifier.h"
#include "ortrain/passes/accumulate_products.h"
#include "ortrain/passes/causal_masks.h"
#include "ortrain/passes/eliminate_identity.h"
#include "ortrain/passes/fold_known_shapes.h"
#include "ortrain/passes/full_losses.h"
#include "ortrain/passes/fuse_classifier_loss.h"
#include "ortrain/passes/fuse_elementwise.h"
#include "ortrain/passes/join_casts.h"
#include "ortrain/passes/merge_attention_heads.h"
#include "ortrain/passes/merge_common.h"
#include "ortrain/passes/move_casts.h"
#include "ortrain/passes/pass_notes.h"
#include "ortrain/passes/recompute_checkpoints.h"
#include "ortrain/passes/recompute_elementwise.h"
#include "ortrain/passes/wide_gradients.h"

namespace ortrain {
namespace {

// A stage can be halted behind it.
constexpr std::string_view kRecomputePass = "recompute_checkpoints";

struct Stage {
  std::string name;
  std::vector<Pass> passes;
};

// The order of all rewrites stands here and nowhere else.
const std::vector<Stage>& stages() {
  static const auto* const all = new std::vector<Stage>{
      {"simplify",
       {fold_known_shapes(), eliminate_identity(), merge_common(), causal_masks(),
        merge_attention_heads(), full_losses(), eliminate_identity()}},
      {"fuse",
       {fold_known_shapes(), eliminate_stop_gradient(), eliminate_identity(), merge_common(),
        move_casts(), recompute_checkpoints(), accumulate_products(), fuse_classifier_loss(),
        wide_gradients(), recompute_elementwise(), fuse_elementwise(), join_casts()}},
  };
  return *all;
}

// Passes that the program has added.
class AddedPasses {
 public:
  static AddedPasses& instance() {
    static auto* const passes = new AddedPasses();
    return *passes;
  }
  // False if there is a pass of this name.
  bool add(const std::string& stage, Pass pass) {
    const std::lock_guard lock(mutex_);
    for (const auto& [of_stage, other] : passes_) {
      if (other.name == pass.name) return false;
    }
    passes_.emplace_back(stage, std::move(pass));
    return true;
  }
  bool remove(const std::string& name) {
    std::vector<std::pair<std::string, Pass>> gone;  // dropped without the lock: that may run code
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::stable_partition(
        passes_, [&](const auto& entry) { return entry.second.name != name; });
    gone.assign(std::make_move_iterator(found.begin()), std::make_move_iterator(found.end()));
    passes_.erase(found.begin(), found.end());
    return !gone.empty();
  }
  std::vector<Pass> of(const std::string& stage) const {
    const std::lock_guard lock(mutex_);
    std::vector<Pass> result;
    for (const auto& [of_stage, pass] : passes_) {
      if (of_stage == stage) result.push_back(pass);
    }
    return result;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::pair<std::string, Pass>> passes_;
};

PassResult run_pass(const Pass& pass, Graph& graph, const std::string& stage, bool verify_after) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  PassResult result{.name = pass.name, .nodes_before = graph.order().size()};
  if (PassNotes* notes = PassNotes::current()) notes->begin(pass.name);
  with_context("pass " + pass.name + ": ", [&] {
    result.changed = pass.run(graph);
    if (result.changed) {
      graph.sort();
      graph.remove_dead_nodes();
      if (verify_after) verify(graph);
    }
  });
  result.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  result.nodes_after = graph.order().size();
  log_line("passes", str(stage, "/", pass.name, ": ", result.nodes_before, " -> ",
                         result.nodes_after, " nodes, ", result.seconds * 1e3, " ms"));
  return result;
}

}  // namespace

bool is_disabled(const std::string& pass) {
  const std::string names = "," + flag("ORTRAIN_DISABLE_PASSES") + ",";
  return names.find("," + pass + ",") != std::string::npos;
}

std::vector<PassResult> run_pipeline(Graph& graph, const std::string& stage_name, StagePart part,
                                     Processor processor) {
  for (const Stage& stage : stages()) {
    if (stage.name != stage_name) continue;
    const auto recompute = std::ranges::find(stage.passes, kRecomputePass, &Pass::name);
    const auto middle = recompute == stage.passes.end() ? recompute : recompute + 1;
    const std::span<const Pass> first(stage.passes.begin(), middle);
    const std::span<const Pass> second(middle, stage.passes.end());
    const bool verify_each = flag_is_on("ORTRAIN_VERIFY");
    std::vector<PassResult> results;
    const auto run_all = [&](std::span<const Pass> passes, bool verify_after) {
      for (const Pass& pass : passes) {
        if (is_disabled(pass.name)) continue;
        if (pass.of_gpus && processor != Processor::gpu) continue;
        if (pass.takes_memory && part == StagePart::behind_recompute) continue;
        results.push_back(run_pass(pass, graph, stage.name, verify_after));
      }
    };
    const std::vector<Pass> added = AddedPasses::instance().of(stage.name);
    if (part != StagePart::behind_recompute) {
      if (stage.name == "fuse") run_all(added, true);
      run_all(first, verify_each);
    }
    if (part != StagePart::up_to_recompute) {
      run_all(second, verify_each);
      if (stage.name != "fuse") run_all(added, true);
    }
    return results;
  }
  throw InternalError(str("there is no pass stage '", stage_name, "'"));
}

void add_pass(const std::string& stage, Pass pass) {
  const auto has_name = [&](const Pass& other) { return other.name == pass.name; };
  bool found = false;
  for (const Stage& known : stages()) {
    found = found || known.name == stage;
    if (std::ranges::any_of(known.passes, has_name)) {
      throw InvalidModelError(str("there is a pass '", pass.name, "' already"));
    }
  }
  if (!found) {
    throw InvalidModelError(str("there is no pass stage '", stage, "'; there are simplify, fuse"));
  }
  const std::string name = pass.name;
  if (!AddedPasses::instance().add(stage, std::move(pass))) {
    throw InvalidModelError(str("there is a pass '", name, "' already"));
  }
}

bool remove_pass(const std::string& name) { return AddedPasses::instance().remove(name); }

std::vector<PassInfo> all_passes() {
  std::vector<PassInfo> result;
  for (const Stage& stage : stages()) {
    for (const Pass& pass : stage.passes) result.push_back({pass.name, stage.name, pass.summary});
  }
  // Takes options.
  result.push_back({"mixed_precision", "precision",
                    "Products run in 16 bits, what would lose by it in float32; casts between."});
  // Chosen for the shapes of a plan that exceeds a budget; runs behind recompute_checkpoints.
  result.push_back({std::string(kRecomputeForMemory), "fuse",
                    "Under a budget of memory, what the backward reads is computed again."});
  // Makes a second graph, for the calls that it fits.
  result.push_back({"remove_padding", "rows",
                    "Layers compute the rows that masks and outputs need, padding goes."});
  return result;
}

}  // namespace ortrain
