// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace ortrain {

// Categories: "dispatch", "passes", "memory", "plan", "export". Off unless ORTRAIN_LOG names them.
bool log_enabled(std::string_view category);
// Hands the line, made printable, to the sink when the category is on, one line at a time unless
// the sink guards itself. Without a sink nothing happens: the library never prints by itself.
void log_line(std::string_view category, const std::string& line);
using LogSink = std::function<void(std::string_view category, std::string_view line)>;
// `guards_itself`: it may be called by several threads at once, and take locks that its callers
// hold.
void set_log_sink(LogSink sink, bool guards_itself = false);

}  // namespace ortrain
