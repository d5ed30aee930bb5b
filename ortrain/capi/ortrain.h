/* SPDX-FileCopyrightText: Ortrain contributors
 * SPDX-License-Identifier: Apache-2.0
 *
 * Training without Python: a trainer is made from artifacts or from an ONNX model, takes batches,
 * and gives losses, checkpoints and models for inference.
 *
 * Every function that can fail returns a status; ortrain_last_error() then says what is wrong, in
 * the calling thread, until that thread's next call. Strings are UTF-8. A trainer may be used by
 * one thread at a time; different trainers by different threads.
 */
#ifndef ORTRAIN_CAPI_ORTRAIN_H_
#define ORTRAIN_CAPI_ORTRAIN_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define ORTRAIN_API __attribute__((visibility("default")))
#else
#define ORTRAIN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ortrain_status {
  ORTRAIN_OK = 0,
  ORTRAIN_INVALID_ARGUMENT = 1, /* a null pointer, an index out of range */
  ORTRAIN_INVALID_MODEL = 2,    /* a model, a name or an option that makes no sense */
  ORTRAIN_INVALID_SHAPE = 3,
  ORTRAIN_INVALID_TYPE = 4,
  ORTRAIN_INDEX = 5, /* a label or index among the data is out of range */
  ORTRAIN_UNSUPPORTED = 6,
  ORTRAIN_FILE = 7,
  ORTRAIN_OUT_OF_MEMORY = 8,
  ORTRAIN_NAN = 9, /* with ORTRAIN_CHECK_NAN=1 */
  ORTRAIN_INTERNAL = 10
} ortrain_status;

/* Element types; the numbers are those of onnx.TensorProto.DataType. */
typedef enum ortrain_dtype {
  ORTRAIN_FLOAT32 = 1,
  ORTRAIN_UINT8 = 2,
  ORTRAIN_INT8 = 3,
  ORTRAIN_UINT16 = 4,
  ORTRAIN_INT16 = 5,
  ORTRAIN_INT32 = 6,
  ORTRAIN_INT64 = 7,
  ORTRAIN_BOOL = 9,
  ORTRAIN_FLOAT16 = 10,
  ORTRAIN_FLOAT64 = 11,
  ORTRAIN_UINT32 = 12,
  ORTRAIN_UINT64 = 13,
  ORTRAIN_BFLOAT16 = 16
} ortrain_dtype;

/* A dense row-major tensor in memory of the caller (inputs), or of the outputs that it came from.
 */
typedef struct ortrain_tensor {
  ortrain_dtype dtype;
  size_t rank;
  const int64_t* dims;
  const void* data;
} ortrain_tensor;

typedef struct ortrain_trainer ortrain_trainer;
typedef struct ortrain_outputs ortrain_outputs;

/* How to train an ONNX model. ortrain_default_options() fills it; change what differs. Numbers are
 * finite and not negative, betas below 1. */
typedef struct ortrain_options {
  const char* loss; /* "cross_entropy", "mse", "l1", "bce_with_logits"; NULL: the model has it */
  const char* loss_output;    /* output that goes into the loss, or is it; NULL: the only one */
  const char* target;         /* name of the input that the loss adds ("target") */
  const char* optimizer;      /* "adamw", "adam", "sgd", "lamb", "adagrad" ("adamw") */
  double learning_rate;       /* 1e-3 */
  double weight_decay;        /* 0 */
  double beta1, beta2;        /* 0.9, 0.999 */
  double epsilon;             /* below 0: the optimizer's own */
  double momentum;            /* of sgd: 0 */
  double max_norm;            /* clip the norm of all gradients to it; 0: do not */
  int64_t accumulation;       /* batches that are averaged for a step: 1 */
  const char* const* trained; /* names of the parameters to train; NULL: all float initializers
                                 that are no scalars */
  size_t num_trained;
} ortrain_options;

ORTRAIN_API const char* ortrain_version(void);
ORTRAIN_API const char* ortrain_last_error(void);
ORTRAIN_API void ortrain_default_options(ortrain_options* options);

/* What the library has to say, by categories that ORTRAIN_LOG names; NULL ends it. It prints
 * nothing itself. */
typedef void (*ortrain_log_callback)(const char* category, const char* line, void* context);
ORTRAIN_API void ortrain_set_log_callback(ortrain_log_callback callback, void* context);

/* --- trainers */

/* From the folder that `ortrain artifacts` wrote. */
ORTRAIN_API ortrain_status ortrain_create_from_artifacts(const char* folder,
                                                         ortrain_trainer** trainer);
/* From an ONNX model; its initializers become the parameters. */
ORTRAIN_API ortrain_status ortrain_create_from_onnx(const char* path,
                                                    const ortrain_options* options,
                                                    ortrain_trainer** trainer);
/* Writes what ortrain_create_from_artifacts reads. */
ORTRAIN_API ortrain_status ortrain_write_artifacts(const char* path, const ortrain_options* options,
                                                   const char* folder);
ORTRAIN_API void ortrain_destroy(ortrain_trainer* trainer); /* NULL is allowed */

/* --- steps. `inputs`: one per input, in their order; they are only read, during the call.
 * `outputs` may be NULL; otherwise the caller destroys what it gets. */

/* Forward and backward; gradients add up until they are reset. */
ORTRAIN_API ortrain_status ortrain_train_step(ortrain_trainer* trainer,
                                              const ortrain_tensor* inputs, size_t num_inputs,
                                              ortrain_outputs** outputs);
/* The optimizer, with the gradients that are there. */
ORTRAIN_API ortrain_status ortrain_optimizer_step(ortrain_trainer* trainer);
/* The next train step starts from zero. */
ORTRAIN_API ortrain_status ortrain_lazy_reset_grad(ortrain_trainer* trainer);
ORTRAIN_API ortrain_status ortrain_eval_step(ortrain_trainer* trainer, const ortrain_tensor* inputs,
                                             size_t num_inputs, ortrain_outputs** outputs);

ORTRAIN_API size_t ortrain_output_count(const ortrain_outputs* outputs);
/* Valid as long as `outputs`. */
ORTRAIN_API ortrain_status ortrain_output(const ortrain_outputs* outputs, size_t index,
                                          ortrain_tensor* tensor);
ORTRAIN_API void ortrain_destroy_outputs(ortrain_outputs* outputs); /* NULL is allowed */

/* --- names: of the training model, or with `evaluation` not 0 of the one that ortrain_eval_step
 * runs. Valid as long as the trainer. */
ORTRAIN_API size_t ortrain_model_input_count(const ortrain_trainer* trainer, int evaluation);
ORTRAIN_API size_t ortrain_model_output_count(const ortrain_trainer* trainer, int evaluation);
ORTRAIN_API ortrain_status ortrain_model_input_name(const ortrain_trainer* trainer, int evaluation,
                                                    size_t index, const char** name);
ORTRAIN_API ortrain_status ortrain_model_output_name(const ortrain_trainer* trainer, int evaluation,
                                                     size_t index, const char** name);

/* --- learning rate and random numbers */
ORTRAIN_API ortrain_status ortrain_get_learning_rate(const ortrain_trainer* trainer, double* rate);
ORTRAIN_API ortrain_status ortrain_set_learning_rate(ortrain_trainer* trainer, double rate);
/* From 0 to `rate` in `warmup` steps, then to 0 at step `total`, by the number of optimizer steps
 * so far, those before a checkpoint among them. ortrain_scheduler_step sets the rate of the next
 * one. */
ORTRAIN_API ortrain_status ortrain_register_linear_lr_scheduler(ortrain_trainer* trainer,
                                                                int64_t warmup, int64_t total,
                                                                double rate);
ORTRAIN_API ortrain_status ortrain_scheduler_step(ortrain_trainer* trainer);
ORTRAIN_API ortrain_status ortrain_set_seed(ortrain_trainer* trainer, uint64_t seed);

/* --- parameters as one row of float32 numbers, in the order of their names; `trained_only` not 0:
 * those that training changes. `count` is that of the numbers. */
ORTRAIN_API ortrain_status ortrain_parameters_size(const ortrain_trainer* trainer, int trained_only,
                                                   size_t* count);
ORTRAIN_API ortrain_status ortrain_copy_parameters_to_buffer(const ortrain_trainer* trainer,
                                                             int trained_only, float* buffer,
                                                             size_t count);
ORTRAIN_API ortrain_status ortrain_copy_buffer_to_parameters(ortrain_trainer* trainer,
                                                             int trained_only, const float* buffer,
                                                             size_t count);

/* --- files */

/* Adds a checkpoint to a folder, whole or not at all. */
ORTRAIN_API ortrain_status ortrain_save_checkpoint(const ortrain_trainer* trainer,
                                                   const char* folder, int with_optimizer);
/* The newest complete checkpoint of a folder; those that are damaged are logged and passed over.
 * Nothing changes unless it fits. */
ORTRAIN_API ortrain_status ortrain_load_checkpoint(ortrain_trainer* trainer, const char* folder);
/* The model with its present weights, in standard operators. `outputs`: names of those to keep;
 * NULL: all. */
ORTRAIN_API ortrain_status ortrain_export_for_inference(const ortrain_trainer* trainer,
                                                        const char* path,
                                                        const char* const* outputs,
                                                        size_t num_outputs);

#ifdef __cplusplus
}
#endif

#endif /* ORTRAIN_CAPI_ORTRAIN_H_ */
