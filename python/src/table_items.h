// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "python/src/attribute_snapshot.h"
#include "python/src/watched_dict.h"

namespace ortrain::python {

// Which objects stand in a dictionary, a list or a set, in their order; not what becomes of them.
class TableItems {
 public:
  TableItems() = default;
  // Of a table that `is_table`.
  explicit TableItems(nanobind::handle table);

  static bool is_table(nanobind::handle object);

  bool is_valid() const { return table_.is_valid(); }
  void tell(const SnapshotContext& context) const;
  // Whether `now` is the table, with the items that it had.
  bool holds(nanobind::handle now);
  int traverse(visitproc visit, void* arg) const;

 private:
  // Of a dictionary keys and values by turns. Runs no code of the table's class.
  std::vector<nanobind::object> read() const;

  nanobind::object table_;
  std::vector<nanobind::object> items_;
  WatchedDict dictionary_;
  uint64_t version_ = 0;  // of the dictionary when it was last compared
};

}  // namespace ortrain::python
