// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "python/src/attribute_snapshot.h"
#include "python/src/function_parts.h"
#include "python/src/watched_dict.h"

namespace ortrain::python {

// Which objects stand in a dictionary, what shows one, a list, a set, a queue, or a variable of the
// context, in their order; in tables and tuples among them likewise, but not what becomes of other
// objects.
class TableItems {
 public:
  TableItems() = default;
  // Of a table that `is_table`, which lies within `depth` others.
  explicit TableItems(nanobind::handle table, int depth = 0);

  static bool is_table(nanobind::handle object);

  bool is_valid() const { return table_.is_valid(); }
  void tell(const SnapshotContext& context) const;
  // Appends the functions that stand there, within others too.
  void append_functions(PartsOfFunctions& functions) const;
  // Whether `now` is the table, with the items that it had.
  bool holds(nanobind::handle now);
  int traverse(visitproc visit, void* arg) const;

 private:
  // Of a dictionary keys and values by turns, and keys again where they have an order of their own.
  // Runs no code of the table's class.
  std::vector<nanobind::object> read() const;

  nanobind::object table_;
  std::vector<nanobind::object> items_;
  std::vector<TableItems> within_;
  WatchedDict dictionary_;
  uint64_t version_ = 0;  // of the dictionary when it was last compared
};

}  // namespace ortrain::python
