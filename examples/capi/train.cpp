// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
// Trains handwritten digits: train FOLDER, with what prepare.py wrote there.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <ortrain/capi/ortrain.hpp>

using ortrain::capi::Options;
using ortrain::capi::Tensor;
using ortrain::capi::Trainer;

int main(int argc, char** argv) try {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const std::string folder = argc > 1 ? argv[1] : ".";
  std::ifstream file(folder + "/digits.bin", std::ios::binary);
  int32_t count = 0, pixels = 0;
  file.read(reinterpret_cast<char*>(&count), 4).read(reinterpret_cast<char*>(&pixels), 4);
  if (!file || count < 500 || pixels < 1) throw std::runtime_error("digits.bin cannot be read");
  std::vector<float> images(size_t(count) * pixels);
  std::vector<int64_t> labels(count);
  file.read(reinterpret_cast<char*>(images.data()), std::streamsize(images.size() * 4));
  if (!file.read(reinterpret_cast<char*>(labels.data()), std::streamsize(count) * 8)) {
    throw std::runtime_error("digits.bin is too short");
  }
  Options options;
  options.loss = "cross_entropy";
  options.learning_rate = 2e-3;
  Trainer trainer = Trainer::from_onnx(folder + "/digits.onnx", options);

  const int64_t trained = count - 300, batch = 32;
  for (int epoch = 1; epoch <= 10; ++epoch) {
    double total = 0;
    for (int64_t at = 0; at < trained; at += batch) {
      const int64_t n = std::min(batch, trained - at);
      trainer.lazy_reset_grad();
      const auto outputs = trainer.train_step(
          {Tensor(&images[at * pixels], {n, pixels}), Tensor(&labels[at], {n})});
      trainer.optimizer_step();
      total += *outputs.data<float>(0) * double(n);
      if (epoch == 1 && at == 0) {
        const std::chrono::duration<double, std::milli> time = Clock::now() - start;
        std::printf("first step %.1f ms after the start\n", time.count());
      }
    }
    const auto outputs = trainer.eval_step(
        {Tensor(&images[trained * pixels], {300, pixels}), Tensor(&labels[trained], {300})});
    int right = 0;
    for (int i = 0; i < 300; ++i) {
      const float* scores = outputs.data<float>(1) + i * 10;
      right += std::max_element(scores, scores + 10) - scores == labels[trained + i];
    }
    std::printf("epoch %2d: loss %.4f, test accuracy %.3f\n", epoch, total / double(trained),
                right / 300.0);
  }
  trainer.save_checkpoint(folder + "/checkpoints");
  trainer.export_for_inference(folder + "/trained.onnx", {trainer.output_names(true)[1]});
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
