// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// The C interface between the engine and a library of operators that is loaded at run time. Plain
// data and function pointers: no C++ type and no exception crosses it. Write operators against
// extension.h, which wraps it.
//
// Element types are the codes of ONNX's TensorProto. A function that returns an int32_t returns 0
// when it succeeded; the calling thread's `last_error` tells why it did not.
extern "C" {

inline constexpr uint32_t kOrtrainExtensionAbi = 1;
inline constexpr char kOrtrainExtensionEntry[] = "ortrain_extension";

// The node that an operator's function is called for; valid during the call.
struct OrtrainContext;
// Takes the operators of one library.
struct OrtrainRegistrar;

enum OrtrainErrorKind : int32_t {
  kOrtrainErrorInternal = 0,
  kOrtrainErrorModel = 1,  // attributes or structure
  kOrtrainErrorShape = 2,
  kOrtrainErrorType = 3,
  kOrtrainErrorIndex = 4,
  kOrtrainErrorUnsupported = 5,
};

// An extent: the number itself, or the number of an expression that the context holds.
struct OrtrainDim {
  int64_t value;
  int32_t is_symbolic;
};

enum OrtrainDimOperation : int32_t {
  kOrtrainDimAdd = 0,
  kOrtrainDimSub = 1,
  kOrtrainDimMul = 2,
  kOrtrainDimFloorDiv = 3,
  kOrtrainDimCeilDiv = 4,
  kOrtrainDimMin = 5,
  kOrtrainDimMax = 6,
  kOrtrainDimBroadcast = 7,
};

enum OrtrainArity : int32_t {
  kOrtrainSingle = 0,
  kOrtrainOptional = 1,
  kOrtrainVariadic = 2,
};

// One formal input or output. `type` is a type variable of the operator.
struct OrtrainFormal {
  const char* name;
  const char* type;
  int32_t arity;  // OrtrainArity
};

enum OrtrainAttributeKind : int32_t {
  kOrtrainInt = 0,
  kOrtrainFloat = 1,
  kOrtrainString = 2,
  kOrtrainInts = 3,
  kOrtrainFloats = 4,
};

// An attribute; which members count depends on `kind`.
struct OrtrainAttribute {
  const char* name;
  int32_t kind;  // OrtrainAttributeKind
  int64_t int_value;
  double float_value;
  const char* string_value;
  const int64_t* ints;
  const double* floats;
  size_t count;  // of ints or floats
};

struct OrtrainFormalAttribute {
  OrtrainAttribute value;  // the default, where there is one
  int32_t has_default;
  int32_t required;
};

struct OrtrainTypeVariable {
  const char* name;
  const int32_t* types;
  size_t count;
};

struct OrtrainOperator {
  size_t size;  // sizeof(OrtrainOperator)
  const char* domain;
  const char* name;
  int32_t since;
  const char* summary;
  const OrtrainFormal* inputs;
  size_t num_inputs;
  const OrtrainFormal* outputs;
  size_t num_outputs;
  const OrtrainFormalAttribute* attributes;
  size_t num_attributes;
  const OrtrainTypeVariable* types;
  size_t num_types;
  int32_t differentiable;  // 0: no gradient by definition
  int32_t draws_random_numbers;
  // Pairs (input, output) that may be the same memory when nobody reads the input later.
  const int32_t* inplace;
  size_t num_inplace;  // pairs
  // Handed to the functions below; it lives as long as the process.
  void* self;
  int32_t (*infer)(void* self, OrtrainContext* context);
  int32_t (*gradient)(void* self, OrtrainContext* context);  // null: none
  // Makes the kernel of one node with known shapes. Several threads may run one kernel.
  int32_t (*prepare)(void* self, OrtrainContext* context, void** kernel);
  int32_t (*run)(void* kernel, const void* const* inputs, void* const* outputs, void* workspace);
  void (*release)(void* kernel);
};

// What the engine offers. Values of a graph are numbers; -1 is an absent one.
struct OrtrainHost {
  uint32_t abi;
  const char* version;

  int32_t (*add_operator)(OrtrainRegistrar* registrar, const OrtrainOperator* op);
  // Errors of the calling thread.
  const char* (*last_error)();
  int32_t (*last_error_kind)();
  void (*set_error)(int32_t kind, const char* message);

  // The node. `kind` of an attribute must be that of the operator's definition.
  int32_t (*attribute)(OrtrainContext* context, const char* name, int32_t kind,
                       OrtrainAttribute* result);
  int32_t (*has_attribute)(OrtrainContext* context, const char* name);  // 1 or 0
  size_t (*num_inputs)(OrtrainContext* context);
  size_t (*num_outputs)(OrtrainContext* context);
  int32_t (*has_input)(OrtrainContext* context, size_t index);   // 1 or 0
  int32_t (*has_output)(OrtrainContext* context, size_t index);  // 1 or 0: somebody wants it
  int32_t (*input_type)(OrtrainContext* context, size_t index, int32_t* type);

  // While shapes are inferred.
  int32_t (*input_rank)(OrtrainContext* context, size_t index, size_t* rank);
  int32_t (*input_dim)(OrtrainContext* context, size_t index, size_t axis, OrtrainDim* dim);
  // The contents of an integer input of rank 0 or 1; *known is 0 where they are not known.
  int32_t (*input_contents)(OrtrainContext* context, size_t index, const int64_t** values,
                            size_t* count, int32_t* known);
  int32_t (*dim_operation)(OrtrainContext* context, int32_t operation, OrtrainDim a, OrtrainDim b,
                           OrtrainDim* result);
  int32_t (*dim_equal)(OrtrainContext* context, OrtrainDim a, OrtrainDim b);  // 1 or 0
  int32_t (*set_output)(OrtrainContext* context, size_t index, int32_t type, const OrtrainDim* dims,
                        size_t rank);

  // While a kernel is made. The extents are valid during the call.
  int32_t (*tensor)(OrtrainContext* context, int32_t is_output, size_t index, int32_t* type,
                    const int64_t** dims, size_t* rank);
  int32_t (*request_workspace)(OrtrainContext* context, size_t bytes);

  // While a gradient is built.
  int32_t (*input_value)(OrtrainContext* context, size_t index, int32_t* value);
  int32_t (*output_value)(OrtrainContext* context, size_t index, int32_t* value);
  int32_t (*output_gradient)(OrtrainContext* context, size_t index, int32_t* value);
  int32_t (*needs_gradient)(OrtrainContext* context, size_t index);  // 1 or 0
  int32_t (*set_input_gradient)(OrtrainContext* context, size_t index, int32_t value);
  int32_t (*add_node)(OrtrainContext* context, const char* domain, const char* name,
                      const int32_t* inputs, size_t num_inputs, const OrtrainAttribute* attributes,
                      size_t num_attributes, int32_t* outputs, size_t num_outputs);
  int32_t (*add_scalar)(OrtrainContext* context, int32_t type, double number, int32_t* value);
  int32_t (*add_int64s)(OrtrainContext* context, const int64_t* numbers, size_t count,
                        int32_t* value);
  int32_t (*reduce_to_shape_of)(OrtrainContext* context, int32_t value, int32_t like,
                                int32_t* result);
  int32_t (*value_type)(OrtrainContext* context, int32_t value, int32_t* type);
  int32_t (*value_rank)(OrtrainContext* context, int32_t value, size_t* rank);

  // Calls body(argument, begin, end) on disjoint ranges that cover [0, count), none shorter than
  // `grain`, on the engine's threads. The body must not throw.
  void (*parallel_for)(int64_t count, int64_t grain,
                       void (*body)(void* argument, int64_t begin, int64_t end), void* argument);
};

// What a library exports under the name kOrtrainExtensionEntry.
using OrtrainExtensionEntry = int32_t (*)(const OrtrainHost* host, OrtrainRegistrar* registrar);
}
