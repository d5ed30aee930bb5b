// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace ortrain {

// Whether `text` is UTF-8 by the Unicode Standard's table 3-7: no overlong forms, no surrogates,
// nothing above U+10FFFF.
bool is_utf8(std::string_view text);

enum class Breaks { kept, escaped };

// `text` as a terminal and a log can show it, in UTF-8: control characters, those that change the
// direction or the line (U+061C, U+200E, U+200F, U+2028 to U+202E, U+2066 to U+2069) and bytes that
// are no UTF-8 become \xNN, byte by byte. Line feeds and tabs are `breaks`.
std::string printable(std::string_view text, Breaks breaks = Breaks::kept);

}  // namespace ortrain
