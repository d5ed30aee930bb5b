// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/log.h"

#include <mutex>

#include "ortrain/base/flags.h"
#include "ortrain/base/printable.h"

namespace ortrain {
namespace {

std::mutex& sink_mutex() {
  static std::mutex mutex;
  return mutex;
}

struct Sink {
  LogSink call;
  bool guards_itself = false;
};

Sink& sink() {
  static Sink current;
  return current;
}

}  // namespace

bool log_enabled(std::string_view category) {
  const std::string enabled = flag("ORTRAIN_LOG");
  if (enabled.empty()) return false;
  size_t begin = 0;
  while (begin <= enabled.size()) {
    const size_t comma = std::min(enabled.find(',', begin), enabled.size());
    const std::string_view word = std::string_view(enabled).substr(begin, comma - begin);
    if (word == category || word == "all") return true;
    begin = comma + 1;
  }
  return false;
}

void log_line(std::string_view category, const std::string& line) {
  if (!log_enabled(category)) return;
  const std::string shown = printable(line);
  std::unique_lock lock(sink_mutex());
  if (!sink().call) return;
  if (!sink().guards_itself) {
    sink().call(category, shown);
    return;
  }
  const LogSink call = sink().call;
  lock.unlock();
  call(category, shown);
}

void set_log_sink(LogSink new_sink, bool guards_itself) {
  std::lock_guard lock(sink_mutex());
  sink() = {std::move(new_sink), guards_itself};
}

}  // namespace ortrain
