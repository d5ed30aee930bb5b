// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/printable.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

// As RFC 3629, section 3, encodes it.
std::string encoded(uint32_t point) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | (point >> shift & 0x3f)); };
  if (point < 0x80) return {static_cast<char>(point)};
  if (point < 0x800) return {static_cast<char>(0xc0 | point >> 6), tail(0)};
  if (point < 0x10000) return {static_cast<char>(0xe0 | point >> 12), tail(6), tail(0)};
  return {static_cast<char>(0xf0 | point >> 18), tail(12), tail(6), tail(0)};
}

TEST(Printable, EveryCodePointButSurrogatesIsUtf8) {
  for (uint32_t point = 0; point <= 0x10ffff; ++point) {
    const bool surrogate = point >= 0xd800 && point <= 0xdfff;
    ASSERT_EQ(is_utf8(encoded(point)), !surrogate) << point;
  }
}

TEST(Printable, NothingElseIsUtf8) {
  for (const char* text :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc3", "\xe2\x82", "\xf0\x9f\x98",
        "a\xc3(", "\xe2(\xa1", "\xf0\x28\x8c\xbc"}) {
    EXPECT_FALSE(is_utf8(text)) << printable(text);
  }
  EXPECT_TRUE(is_utf8(""));
}

TEST(Printable, TextIsKept) {
  const std::string text = "layer.0/größe 語 😀 \\x41";
  EXPECT_EQ(printable(text), text);
  EXPECT_EQ(printable("a\n\tb"), "a\n\tb");
  EXPECT_EQ(printable("a\n\tb", Breaks::escaped), "a\\x0a\\x09b");
}

TEST(Printable, WhatSteersATerminalOrTurnsALineIsNot) {
  EXPECT_EQ(printable("\x1b[2J"), "\\x1b[2J");
  EXPECT_EQ(printable(std::string("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(printable("\x7f\r"), "\\x7f\\x0d");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");           // CSI in one character
  EXPECT_EQ(printable("\xe2\x80\xae"), "\\xe2\\x80\\xae");  // right to left from here
  EXPECT_EQ(printable("\xe2\x81\xa9"), "\\xe2\\x81\\xa9");
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
}

TEST(Printable, AnyBytesBecomeUtf8AndStaySo) {
  std::mt19937 draw(0);
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (uint32_t bytes = draw() % 12; bytes > 0; --bytes) text += static_cast<char>(draw());
    const std::string shown = printable(text, Breaks::escaped);
    ASSERT_TRUE(is_utf8(shown));
    ASSERT_EQ(printable(shown, Breaks::escaped), shown);
    for (const char c : shown) ASSERT_GE(static_cast<unsigned char>(c), 0x20);
  }
}

TEST(Printable, MessagesAre) {
  const std::string frame = "[Op '\x1b\xff'] ";
  try {
    with_context(frame, [&] { with_context(frame, [] { throw ShapeError("first\nsecond"); }); });
    FAIL();
  } catch (const ShapeError& error) {
    EXPECT_STREQ(error.what(), "[Op '\\x1b\\xff'] first\nsecond");
  }
}

}  // namespace
}  // namespace ortrain
