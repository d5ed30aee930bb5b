// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/ir/confined_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <string>

#include "ortrain/base/error.h"

namespace ortrain {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using Method = ConfinedDirectory::Method;

std::string contents_of(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

class confined_file : public ::testing::TestWithParam<Method> {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "ortrain-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    fs::create_directories(root_ / "model/a");
    write(root_ / "secret", "secret");
    write(root_ / "model/w.bin", "weights");
    write(root_ / "model/a/w.bin", "nested");
  }
  void TearDown() override { fs::remove_all(root_); }

  static void write(const fs::path& path, std::string_view text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  InputFile open(std::string_view name, bool allow_links = false) const {
    return ConfinedDirectory(root_ / "model", GetParam()).open(name, allow_links);
  }
  std::string read(std::string_view name, bool allow_links = false) const {
    const InputFile file = open(name, allow_links);
    std::string text(file.size(), ' ');
    file.read(0, text.data(), text.size());
    return text;
  }
  std::string refused(std::string_view name) const {
    try {
      open(name);
    } catch (const InvalidModelError& error) {
      return error.what();
    }
    ADD_FAILURE() << "opened " << name;
    return "";
  }

  fs::path root_;
};

INSTANTIATE_TEST_SUITE_P(method, confined_file, ::testing::Values(Method::automatic, Method::walk),
                         [](const auto& info) {
                           return info.param == Method::walk ? "walk" : "automatic";
                         });

TEST_P(confined_file, opens_what_lies_in_the_folder) {
  EXPECT_EQ(read("w.bin"), "weights");
  EXPECT_EQ(read("a/w.bin"), "nested");
  EXPECT_EQ(read("./a//./w.bin"), "nested");
}

TEST_P(confined_file, refuses_a_missing_file) {
  EXPECT_THROW(open("missing"), FileError);
  EXPECT_THROW(open("b/missing"), FileError);
  EXPECT_THROW(ConfinedDirectory(root_ / "missing"), FileError);
  EXPECT_THROW(ConfinedDirectory(root_ / "secret"), FileError);
}

TEST_P(confined_file, refuses_parent_folders) {
  for (const char* name : {"../secret", "a/../../secret", "..", "a/..", "a/../w.bin", "./.."}) {
    EXPECT_THAT(refused(name), HasSubstr("out of the folder")) << name;
  }
}

TEST_P(confined_file, refuses_backslashes) {
  EXPECT_THAT(refused("..\\secret"), HasSubstr("backslash"));
}

TEST_P(confined_file, refuses_absolute_names) {
  EXPECT_THAT(refused((root_ / "model/w.bin").string()), HasSubstr("absolute"));
  EXPECT_THAT(refused("/etc/passwd"), HasSubstr("absolute"));
}

TEST_P(confined_file, refuses_nul_and_empty_names) {
  EXPECT_THAT(refused(std::string_view("w.bin\0x", 7)), HasSubstr("NUL"));
  EXPECT_THAT(refused(""), HasSubstr("empty"));
  EXPECT_THAT(refused(std::string(5000, 'x')), HasSubstr("too long"));
}

TEST_P(confined_file, refuses_folders) {
  EXPECT_THAT(refused("a"), HasSubstr("a folder"));
  EXPECT_THAT(refused("a/"), HasSubstr("folder"));
  EXPECT_THAT(refused("."), HasSubstr("a folder"));
}

TEST_P(confined_file, refuses_a_fifo_without_opening_it) {
  ASSERT_EQ(::mkfifo((root_ / "model/pipe").c_str(), 0600), 0);
  EXPECT_THAT(refused("pipe"), HasSubstr("a FIFO"));
}

TEST_P(confined_file, refuses_a_socket) {
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = (root_ / "model/socket").string();
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  path.copy(address.sun_path, path.size());
  ASSERT_EQ(::bind(descriptor, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_THAT(refused("socket"), HasSubstr("a socket"));
  ::close(descriptor);
}

TEST_P(confined_file, refuses_devices) {
  const ConfinedDirectory dev("/dev", GetParam());
  EXPECT_THROW(dev.open("zero"), InvalidModelError);
  EXPECT_THROW(dev.open("null"), InvalidModelError);
  EXPECT_THROW(open_regular_file("/dev/zero"), FileError);
}

TEST_P(confined_file, refuses_symbolic_links) {
  fs::create_symlink("w.bin", root_ / "model/link");
  fs::create_symlink("../secret", root_ / "model/out");
  fs::create_directory_symlink("..", root_ / "model/up");
  fs::create_directory_symlink("a", root_ / "model/down");
  for (const char* name : {"link", "out", "up/secret", "down/w.bin", "up/model/w.bin"}) {
    EXPECT_THAT(refused(name), HasSubstr("link")) << name;
  }
  EXPECT_EQ(read("link", true), "weights");
  EXPECT_EQ(read("down/w.bin", true), "nested");
  EXPECT_THROW(open("../secret", true), InvalidModelError);
}

TEST_P(confined_file, refuses_hard_links) {
  fs::create_hard_link(root_ / "secret", root_ / "model/hard");
  EXPECT_THAT(refused("hard"), HasSubstr("hard links"));
  EXPECT_EQ(read("hard", true), "secret");
}

TEST_P(confined_file, notices_a_file_that_became_shorter) {
  const InputFile file = open("w.bin");
  fs::resize_file(root_ / "model/w.bin", 2);
  char buffer[8];
  EXPECT_THROW(file.read(0, buffer, 7), FileError);
}

TEST_P(confined_file, opens_what_the_user_names) {
  EXPECT_EQ(open_regular_file(root_ / "secret").size(), 6u);
  EXPECT_THROW(open_regular_file(root_ / "missing"), FileError);
  EXPECT_THROW(open_regular_file(root_), FileError);
  ASSERT_EQ(::mkfifo((root_ / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(open_regular_file(root_ / "pipe"), FileError);
}

TEST_P(confined_file, output_replaces_on_commit_alone) {
  {
    OutputFile file(root_ / "model", "w.bin");
    file.write("half", 4);
  }
  EXPECT_EQ(contents_of(root_ / "model/w.bin"), "weights");
  {
    OutputFile file(root_ / "model", "w.bin");
    file.write("fresh", 5);
    EXPECT_EQ(contents_of(root_ / "model/w.bin"), "weights");
    file.commit();
  }
  EXPECT_EQ(contents_of(root_ / "model/w.bin"), "fresh");
  EXPECT_EQ(std::distance(fs::directory_iterator(root_ / "model"), {}), 2);
}

TEST_P(confined_file, output_stays_in_its_folder) {
  for (const std::string name : {"../w", "a/w", "/w", "..", ".", "", "a\\w"}) {
    EXPECT_THROW(OutputFile(root_ / "model", name), FileError) << name;
  }
  EXPECT_THROW(OutputFile(root_ / "model", std::string("a\0b", 3)), FileError);
  EXPECT_THROW(OutputFile(root_ / "model", "a"), FileError);
  EXPECT_THROW(OutputFile(root_ / "missing", "w"), FileError);
  fs::create_symlink("../secret", root_ / "model/out");
  OutputFile file(root_ / "model", "out");
  file.write("fresh", 5);
  file.commit();
  EXPECT_EQ(contents_of(root_ / "secret"), "secret");
  EXPECT_FALSE(fs::is_symlink(root_ / "model/out"));
}

TEST_P(confined_file, a_full_disk_names_path_and_bytes_and_leaves_the_old_file) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{4096, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string message;
  try {
    OutputFile file(root_ / "model", "w.bin");
    const std::string data(10000, 'x');
    file.write(data.data(), data.size());
    file.commit();
  } catch (const FileError& error) {
    message = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, HasSubstr("w.bin\" after 4096 bytes"));
  EXPECT_EQ(contents_of(root_ / "model/w.bin"), "weights");
}

}  // namespace
}  // namespace ortrain
