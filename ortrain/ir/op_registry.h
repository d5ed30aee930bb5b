// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ortrain/ir/op_def.h"

namespace ortrain {

// All operators, keyed by (domain, name). Thread-safe; what it returns stays valid and unchanged as
// long as the process lives.
class OpRegistry {
 public:
  // Throws InternalError if the operator is there already; one with `until` may stand beside it.
  void add(OpDef def);
  // Null when unknown.
  const OpDef* find(std::string_view domain, std::string_view name) const;
  // Throws UnsupportedError naming the operator.
  const OpDef& get(std::string_view domain, std::string_view name) const;
  // The meaning at an opset of the operator's domain. Throws UnsupportedError where it is not
  // known.
  const OpDef& at(std::string_view domain, std::string_view name, int64_t opset) const;
  // Operators that graphs hold, sorted by domain, then name.
  std::vector<const OpDef*> all() const { return select(false); }
  // Those that stand for others (OpDef::expand), in the same order.
  std::vector<const OpDef*> composites() const { return select(true); }
  // Meanings that ended (OpDef::until), in the same order.
  std::vector<const OpDef*> earlier() const;
  // Gives an operator a gradient rule; graphs differentiated before keep what they have. Throws
  // UnsupportedError for an unknown operator, InvalidModelError if it has a rule, unless `replace`,
  // and for one without a gradient by definition.
  void set_gradient(std::string_view domain, std::string_view name,
                    std::function<void(GradContext&)> gradient, bool replace);

 private:
  using Key = std::pair<std::string, std::string>;

  std::vector<const OpDef*> select(bool composite) const;

  mutable std::shared_mutex mutex_;
  std::map<Key, const OpDef*, std::less<>> defs_;
  std::multimap<Key, const OpDef*, std::less<>> earlier_;  // those with `until`
  std::vector<std::unique_ptr<const OpDef>> store_;        // all that defs_ ever pointed to
};

// Generated at build time: calls every register_<stem> of ortrain/ops.
void register_all_ops(OpRegistry& registry);

// The process-wide registry, filled on first use.
const OpRegistry& op_registry();
// The same, for what is added at run time.
OpRegistry& mutable_op_registry();

}  // namespace ortrain
