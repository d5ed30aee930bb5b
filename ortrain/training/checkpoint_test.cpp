// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/training/checkpoint.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <thread>

#include "ortrain/base/error.h"
#include "ortrain/ir/confined_file.h"
#include "ortrain/training/safetensors_file.h"

namespace ortrain {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Checkpoints : public ::testing::Test {
 protected:
  void SetUp() override {
    folder = fs::temp_directory_path() / ("ortrain_checkpoint_" + std::to_string(::getpid()));
    fs::remove_all(folder);
    fs::create_directory(folder);
  }
  void TearDown() override { fs::remove_all(folder); }

  static MutableTensor tensor(const std::vector<float>& values) {
    return MutableTensor::copy_of(
        TensorData::from_values(DType::f32, {static_cast<int64_t>(values.size())}, values));
  }
  static std::vector<float> floats(const MutableTensor& tensor) {
    const auto* data = static_cast<const float*>(tensor.data);
    return {data, data + tensor.spec.numel()};
  }
  static void fill(TrainingState& state, float value) {
    state.tensors["w"] = tensor({value, 2});
    state.tensors["b"] = tensor({value});
    state.optimizer["w:exp_avg"] = tensor({value, value});
    state.optimizer["w:grad"] = tensor({7, 7});
    state.steps = static_cast<int64_t>(value);
    state.learning_rate = 0.1;
    state.seed = std::numeric_limits<uint64_t>::max();
    state.runs = 5;
  }
  static std::string contents(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  static void write(const fs::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  }
  // The newest complete one holds this number.
  float loaded(size_t passed_over) {
    const Checkpoint checkpoint = load_checkpoint(folder);
    EXPECT_EQ(checkpoint.passed_over.size(), passed_over);
    return floats(checkpoint.tensors.at("w"))[0];
  }

  fs::path folder;
};

TEST_F(Checkpoints, KeepEverything) {
  TrainingState state;
  fill(state, 3);
  state.kept_batches = 2;
  const double odd = 0.1 + 0.2;
  const fs::path path = save_checkpoint(
      folder, state, {{"epoch", int64_t{4}}, {"loss", odd}, {"name", std::string("ä\"\n")}});
  EXPECT_EQ(path.filename(), "checkpoint-00000001");
  const Checkpoint checkpoint = load_checkpoint(folder);
  TrainingState other;
  restore(other, checkpoint);
  EXPECT_THAT(floats(other.tensors.at("w")), ElementsAre(3, 2));
  EXPECT_THAT(floats(other.optimizer.at("w:exp_avg")), ElementsAre(3, 3));
  EXPECT_THAT(floats(other.optimizer.at("w:grad")), ElementsAre(7, 7));
  EXPECT_EQ(other.kept_batches, 2);
  EXPECT_EQ(other.learning_rate, 0.1);
  EXPECT_EQ(other.seed, state.seed);
  EXPECT_EQ(other.runs, 5U);
  EXPECT_EQ(std::get<int64_t>(checkpoint.properties.at("epoch")), 4);
  EXPECT_EQ(std::get<double>(checkpoint.properties.at("loss")), odd);
  EXPECT_EQ(std::get<std::string>(checkpoint.properties.at("name")), "ä\"\n");
  EXPECT_EQ(load_checkpoint(path).steps, 3) << "by its own folder";
  EXPECT_THROW(save_checkpoint(path, state), FileError) << "no checkpoint inside of another";
}

TEST_F(Checkpoints, LeaveOutWhatIsNotNeeded) {
  TrainingState state;
  fill(state, 3);
  save_checkpoint(folder, state);
  EXPECT_FALSE(load_checkpoint(folder).optimizer.contains("w:grad")) << "no batch is kept";
  save_checkpoint(folder, state, {}, {.optimizer = false});
  const Checkpoint bare = load_checkpoint(folder);
  EXPECT_FALSE(bare.has_optimizer);
  TrainingState other;
  fill(other, 9);
  restore(other, bare);
  EXPECT_TRUE(other.optimizer.empty()) << "it starts anew";
  EXPECT_EQ(other.steps, 0);
}

TEST_F(Checkpoints, StayInTheNumberAskedFor) {
  TrainingState state;
  for (int i = 1; i <= 5; ++i) {
    fill(state, static_cast<float>(i));
    save_checkpoint(folder, state, {}, {.keep = 3});
  }
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  EXPECT_THAT(names,
              ElementsAre("checkpoint-00000003", "checkpoint-00000004", "checkpoint-00000005"));
}

TEST_F(Checkpoints, RestoreIntoTheSameMemory) {
  TrainingState state;
  fill(state, 3);
  save_checkpoint(folder, state);
  const void* const before = state.tensors.at("w").data;
  static_cast<float*>(state.tensors.at("w").data)[0] = 100;
  restore(state, load_checkpoint(folder));
  EXPECT_EQ(state.tensors.at("w").data, before);
  EXPECT_THAT(floats(state.tensors.at("w")), ElementsAre(3, 2));
}

TEST_F(Checkpoints, RefuseOtherModels) {
  TrainingState state;
  fill(state, 3);
  save_checkpoint(folder, state);
  const Checkpoint checkpoint = load_checkpoint(folder);
  const auto message = [&](TrainingState& other, bool strict) -> std::string {
    try {
      restore(other, checkpoint, strict);
    } catch (const InvalidModelError& error) {
      return error.what();
    }
    return "";
  };
  TrainingState more;
  fill(more, 9);
  more.tensors["v"] = tensor({1});
  EXPECT_THAT(message(more, true), HasSubstr("the model has 'v'"));
  EXPECT_THAT(floats(more.tensors.at("w")), ElementsAre(9, 2)) << "nothing has changed";
  EXPECT_EQ(message(more, false), "");
  EXPECT_THAT(floats(more.tensors.at("w")), ElementsAre(3, 2));
  TrainingState fewer;
  fewer.tensors["w"] = tensor({9, 9});
  EXPECT_THAT(message(fewer, true), HasSubstr("the checkpoint has 'b'"));
  TrainingState other_shape;
  fill(other_shape, 9);
  other_shape.tensors["w"] = tensor({9, 9, 9});
  EXPECT_THAT(message(other_shape, false), HasSubstr("'w' as float32[2], the model as float32[3]"));
}

TEST_F(Checkpoints, FallBackToTheOneBeforeWhereFilesAreDamaged) {
  TrainingState state;
  for (float value : {1.0f, 2.0f}) {
    fill(state, value);
    save_checkpoint(folder, state);
  }
  const fs::path newest = folder / "checkpoint-00000002";
  int cases = 0;
  for (const char* name : {"manifest.json", "parameters.safetensors", "optimizer.safetensors"}) {
    const fs::path path = newest / name;
    const std::string whole = contents(path);
    const auto damage = [&](const std::string& bytes) {
      write(path, bytes);
      EXPECT_EQ(loaded(1), 1.0f) << name;
      write(path, whole);
      EXPECT_EQ(loaded(0), 2.0f) << name;
      ++cases;
    };
    damage(whole.substr(0, whole.size() / 2));
    damage("");
    damage(whole + " ");
    for (size_t at = 0; at < whole.size(); at += 1 + whole.size() / 61) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << (at % 8)));
      damage(flipped);
    }
    fs::rename(path, newest / "elsewhere");
    EXPECT_EQ(loaded(1), 1.0f) << name;
    fs::rename(newest / "elsewhere", path);
  }
  EXPECT_GT(cases, 100);
  for (const auto& entry : fs::directory_iterator(folder))
    write(entry.path() / "manifest.json", "");
  EXPECT_THROW(load_checkpoint(folder), FileError);
}

TEST_F(Checkpoints, RefuseFoldersWithoutAny) {
  EXPECT_THROW(load_checkpoint(folder), FileError);
  EXPECT_THROW(load_checkpoint(folder / "none"), FileError);
}

TEST_F(Checkpoints, SurviveAFullDisk) {
  TrainingState state;
  fill(state, 1);
  save_checkpoint(folder, state);
  fill(state, 2);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 64, .rlim_max = old.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  EXPECT_THROW(save_checkpoint(folder, state), FileError);
  ::setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(loaded(0), 1.0f);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder), fs::directory_iterator()), 1);
}

TEST_F(Checkpoints, AreRefusedByFoldersThatCannotBeWritten) {
  TrainingState state;
  fill(state, 1);
  write(folder / "file", "");
  EXPECT_THROW(save_checkpoint(folder / "file", state), FileError);
}

TEST_F(Checkpoints, LeaveOtherFoldersAlone) {
  for (const char* name : {"checkpoint-500", "checkpoint-1500"}) {
    fs::create_directory(folder / name);
    write(folder / name / "pytorch_model.bin", "somebody else's");
  }
  TrainingState state;
  for (int i = 1; i <= 3; ++i) {
    fill(state, static_cast<float>(i));
    save_checkpoint(folder, state, {}, {.keep = 1});
  }
  EXPECT_TRUE(fs::exists(folder / "checkpoint-500" / "pytorch_model.bin"));
  EXPECT_TRUE(fs::exists(folder / "checkpoint-1500" / "pytorch_model.bin"));
  EXPECT_EQ(loaded(0), 3.0f);
}

TEST_F(Checkpoints, PassOverNumbersThatMakeNoSense) {
  TrainingState state;
  fill(state, 1);
  save_checkpoint(folder, state);
  const auto refused = [&](const char* name, const auto& change) {
    fill(state, 2);
    state.kept_batches = 0;
    state.loss_scale = 1;
    change();
    const fs::path path = save_checkpoint(folder, state);
    const Checkpoint checkpoint = load_checkpoint(folder);
    ASSERT_EQ(checkpoint.passed_over.size(), 1U) << name;
    EXPECT_THAT(checkpoint.passed_over[0], HasSubstr(name));
    EXPECT_EQ(checkpoint.steps, 1);
    fs::remove_all(path);
  };
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  refused("'steps' is -1", [&] { state.steps = -1; });
  refused("'steps' is 9223372036854775807", [&] { state.steps = kMost; });
  refused("'kept_batches' is -3", [&] { state.kept_batches = -3; });
  refused("'kept_batches'", [&] { state.kept_batches = kMost; });
  refused("'learning_rate'", [&] { state.learning_rate = NAN; });
  refused("'learning_rate'", [&] { state.learning_rate = -0.1; });
  refused("'loss_scale'", [&] { state.loss_scale = INFINITY; });
  refused("'a' is -3", [&] { state.set_updates({{"a", -3}}); });
  refused("'a' has had 9 updates", [&] { state.set_updates({{"a", 9}}); });
}

TEST_F(Checkpoints, AreSavedBesideFoldersOfAnyNumberAndPipes) {
  fs::create_directory(folder / "checkpoint-18446744073709551615");
  write(folder / "checkpoint-18446744073709551615" / "pytorch_model.bin", "somebody else's");
  fs::create_directory(folder / "checkpoint-7");
  ASSERT_EQ(::mkfifo((folder / "checkpoint-7" / "manifest.json").c_str(), 0600), 0);
  TrainingState state;
  fill(state, 1);
  EXPECT_EQ(save_checkpoint(folder, state).filename(), "checkpoint-00000008");
  EXPECT_EQ(save_checkpoint(folder, state).filename(), "checkpoint-00000009");
  EXPECT_EQ(loaded(0), 1.0f);
  fs::remove_all(folder / "checkpoint-00000008");
  fs::remove_all(folder / "checkpoint-00000009");
  EXPECT_THROW(load_checkpoint(folder), FileError);
  EXPECT_TRUE(fs::exists(folder / "checkpoint-18446744073709551615" / "pytorch_model.bin"));
}

TEST_F(Checkpoints, NameWhoIsInTheWay) {
  const FileHandle other(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(::flock(other.get(), LOCK_EX), 0);
  TrainingState state;
  fill(state, 1);
  try {
    save_checkpoint(folder, state, {}, {.patience = std::chrono::milliseconds(50)});
    ADD_FAILURE() << "two savers at a time";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), HasSubstr("process " + std::to_string(::getpid())));
  }
  EXPECT_TRUE(fs::is_empty(folder));
  ::flock(other.get(), LOCK_UN);
  save_checkpoint(folder, state);
}

TEST_F(Checkpoints, ComeFromFoldersOfAnyName) {
  TrainingState state;
  fill(state, 4);
  save_checkpoint(folder / "checkpoint-3", state);
  EXPECT_EQ(load_checkpoint(folder / "checkpoint-3").steps, 4);
}

TEST_F(Checkpoints, AreSavedBySeveralThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      TrainingState state;
      fill(state, 1);
      for (int i = 0; i < 10; ++i) EXPECT_NO_THROW(save_checkpoint(folder, state));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(loaded(0), 1.0f);
  EXPECT_EQ(load_checkpoint(folder).path.filename(), "checkpoint-00000040");
}

TEST_F(Checkpoints, MayBeHardLinked) {
  TrainingState state;
  fill(state, 2);
  const fs::path path = save_checkpoint(folder, state);
  fs::create_hard_link(path / "parameters.safetensors", folder / "backup");
  EXPECT_EQ(loaded(0), 2.0f);
}

TEST_F(Checkpoints, OfEndlessDepthAreDamaged) {
  TrainingState state;
  for (float value : {1.0f, 2.0f}) {
    fill(state, value);
    save_checkpoint(folder, state);
  }
  const std::string deep(500000, '[');
  write(folder / "checkpoint-00000002" / "manifest.json",
        R"({"digest":"x","a":)" + deep + std::string(deep.size(), ']') + "}");
  EXPECT_EQ(loaded(1), 1.0f);
}

TEST_F(Checkpoints, KeepTheirContentsWhileTrainingGoesOn) {
  TrainingState state, other;
  fill(state, 3);
  save_checkpoint(folder, state);
  const Checkpoint checkpoint = load_checkpoint(folder);
  restore(other, checkpoint);
  static_cast<float*>(other.optimizer.at("w:exp_avg").data)[0] = 50;
  static_cast<float*>(other.tensors.at("w").data)[0] = 50;
  TrainingState again;
  restore(again, checkpoint);
  EXPECT_THAT(floats(again.optimizer.at("w:exp_avg")), ElementsAre(3, 3));
  EXPECT_THAT(floats(again.tensors.at("w")), ElementsAre(3, 2));
}

TEST_F(Checkpoints, RemoveWhatACrashLeft) {
  fs::create_directory(folder / ".saving-1-0");
  write(folder / ".saving-1-0" / "parameters.safetensors", "half");
  TrainingState state;
  fill(state, 1);
  save_checkpoint(folder, state);
  EXPECT_FALSE(fs::exists(folder / ".saving-1-0"));
  // Of a process that ended while it removed an old one.
  fs::rename(folder / "checkpoint-00000001", folder / ".saving-removed-checkpoint-00000001");
  save_checkpoint(folder, state);
  EXPECT_FALSE(fs::exists(folder / ".saving-removed-checkpoint-00000001"));
}

class SafetensorsFiles : public Checkpoints {
 protected:
  void refuse(const std::string& header, const std::string& bytes, const std::string& text,
              std::optional<uint64_t> length = std::nullopt) {
    const uint64_t size = length.value_or(header.size());
    write(folder / "t", std::string(reinterpret_cast<const char*>(&size), 8) + header + bytes);
    try {
      SafetensorsFile file(open_regular_file(folder / "t"));
      ADD_FAILURE() << "accepted " << header;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr(text)) << header;
    }
  }
};

TEST_F(SafetensorsFiles, HoldEveryTypeAndShape) {
  std::map<std::string, MutableTensor> tensors;
  for (DType type :
       {DType::boolean, DType::u8, DType::i8, DType::u16, DType::i16, DType::u32, DType::i32,
        DType::u64, DType::i64, DType::f16, DType::bf16, DType::f32, DType::f64}) {
    for (const Dims& dims : {Dims{}, Dims{3}, Dims{0, 4}, Dims{2, 1, 3}}) {
      MutableTensor tensor = MutableTensor::zeros({type, dims});
      for (size_t i = 0; i < tensor.spec.bytes(); ++i) static_cast<char*>(tensor.data)[i] = i % 2;
      tensors[str(name_of(type), dims_str(dims))] = tensor;
    }
  }
  const FileDigest digest = write_safetensors(folder, "t", tensors, {{"key", "value"}});
  const SafetensorsFile file(open_regular_file(folder / "t"));
  EXPECT_EQ(file.digest(), digest);
  EXPECT_EQ(file.metadata().at("key"), "value");
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const auto& [name, entry] : file.entries()) {
    const MutableTensor& expected = tensors.at(name);
    const MutableTensor read = file.read(entry);
    EXPECT_EQ(read.spec, expected.spec) << name;
    EXPECT_EQ(std::memcmp(read.data, expected.data, read.spec.bytes()), 0) << name;
    EXPECT_EQ(entry.offset % size_of(entry.spec.dtype), 0U) << name;
  }
}

TEST_F(SafetensorsFiles, AreRefusedWhereTheyLie) {
  const std::string bytes(8, 'x');
  refuse("", "", "no JSON object", 0);
  refuse("{}", "", "longer than the file", 3);
  refuse("{}", "", "longer than the file", ~uint64_t{0});
  refuse("[]", "", "no JSON object");
  refuse("{", "", "no JSON object");
  refuse("{}", bytes, "bytes belong to no tensor");
  const auto entry = [](const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}}";
  };
  refuse(entry("F32", "[2]", "[0,4]"), bytes, "not those of its shape");
  refuse(entry("F32", "[3]", "[0,12]"), bytes, "not those of its shape");
  refuse(entry("F32", "[2]", "[8,0]"), bytes, "not those of its shape");
  refuse(entry("F32", "[1]", "[4,8]"), bytes, "overlap");
  refuse(entry("F32", "[-2]", "[0,8]"), bytes, "no whole number");
  refuse(entry("F32", "[1.5]", "[0,8]"), bytes, "no whole number");
  refuse(entry("F32", "[4294967296,4294967296]", "[0,8]"), bytes, "too large");
  refuse(entry("F32", "[0,18446744073709551615]", "[0,0]"), bytes, "too large");
  refuse(entry("F8_E4M3", "[8]", "[0,8]"), bytes, "element type F8_E4M3");
  refuse(entry("F32", "2", "[0,8]"), bytes, "no shape");
  refuse(entry("F32", "[2]", "[0]"), bytes, "no data_offsets");
  refuse(R"({"a":3})", bytes, "no object");
  refuse(R"({"__metadata__":{"a":3}})", "", "no string");
  refuse(R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
         R"("b":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
         bytes, "overlap");
}

}  // namespace
}  // namespace ortrain
