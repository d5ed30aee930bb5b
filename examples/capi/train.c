/* SPDX-FileCopyrightText: Ortrain contributors
 * SPDX-License-Identifier: Apache-2.0
 * Trains handwritten digits: train FOLDER, with what prepare.py wrote there. */
#include <ortrain/capi/ortrain.h>
#include <stdio.h>
#include <stdlib.h>

static void check(ortrain_status status) {
  if (status == ORTRAIN_OK) return;
  fprintf(stderr, "%s\n", ortrain_last_error());
  exit(1);
}

static void* read_numbers(FILE* file, size_t size, size_t count) {
  void* numbers = malloc(size * count);
  if (numbers && fread(numbers, size, count, file) == count) return numbers;
  fprintf(stderr, "digits.bin cannot be read\n");
  exit(1);
}

int main(int argc, char** argv) {
  const char* folder = argc > 1 ? argv[1] : ".";
  char path[4096];
  snprintf(path, sizeof path, "%s/digits.bin", folder);
  FILE* file = fopen(path, "rb");
  if (!file) return fprintf(stderr, "there is no %s\n", path), 1;
  int32_t* extents = read_numbers(file, 4, 2);
  const int64_t count = extents[0], pixels = extents[1], trained = count - 300, batch = 32;
  if (trained < batch || pixels < 1) return fprintf(stderr, "digits.bin is too short\n"), 1;
  float* images = read_numbers(file, 4, (size_t)(count * pixels));
  int64_t* labels = read_numbers(file, 8, (size_t)count);
  fclose(file);

  ortrain_options options;
  ortrain_default_options(&options);
  options.loss = "cross_entropy";
  options.learning_rate = 2e-3;
  ortrain_trainer* trainer = NULL;
  snprintf(path, sizeof path, "%s/digits.onnx", folder);
  check(ortrain_create_from_onnx(path, &options, &trainer));
  for (int epoch = 1; epoch <= 10; ++epoch) {
    double total = 0;
    for (int64_t at = 0; at < trained; at += batch) {
      const int64_t n = trained - at < batch ? trained - at : batch, dims[] = {n, pixels};
      const ortrain_tensor inputs[] = {{ORTRAIN_FLOAT32, 2, dims, images + at * pixels},
                                       {ORTRAIN_INT64, 1, dims, labels + at}};
      ortrain_outputs* outputs = NULL;
      ortrain_tensor loss;
      check(ortrain_lazy_reset_grad(trainer));
      check(ortrain_train_step(trainer, inputs, 2, &outputs));
      check(ortrain_optimizer_step(trainer));
      check(ortrain_output(outputs, 0, &loss));
      total += *(const float*)loss.data * (double)n;
      ortrain_destroy_outputs(outputs);
    }
    printf("epoch %2d: loss %.4f\n", epoch, total / (double)trained);
  }
  snprintf(path, sizeof path, "%s/checkpoints_c", folder);
  check(ortrain_save_checkpoint(trainer, path, 1));
  ortrain_destroy(trainer);
  free(extents), free(images), free(labels);
  return 0;
}
