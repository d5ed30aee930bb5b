// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/expr_source.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "ortrain/gpu/expr_kernels.h"
#include "ortrain/gpu/expr_samples_test.h"
#include "ortrain/gpu/gpu_device.h"
#include "ortrain/gpu/host_compiler.h"
#include "ortrain/gpu/interpreted_program.h"
#include "ortrain/ir/op_registry.h"
#include "ortrain/runtime/fault.h"

using ::testing::ElementsAre;
using ::testing::Pair;

namespace ortrain::gpu {
namespace {

// Tensors at an address that is a multiple of 64 plus `shift` elements.
struct Buffer {
  Buffer(DType type, const Dims& dims, size_t shift)
      : bytes(static_cast<size_t>(num_elements(dims)) * size_of(type)) {
    const auto room = static_cast<int64_t>(bytes + 128 + shift * size_of(type));
    owner = TensorData::allocate(DType::u8, {room}, &data);
    std::memset(data, 0xab, static_cast<size_t>(room));
    data = static_cast<char*>(data) + shift * size_of(type);
  }
  bool kept_its_end() const {
    const auto* end = static_cast<const unsigned char*>(data) + bytes;
    return std::all_of(end, end + 64, [](unsigned char byte) { return byte == 0xab; });
  }
  size_t bytes;
  void* data = nullptr;
  TensorData owner;
};

struct Operands {
  Operands(const ExprSample& sample, size_t shift) {
    for (size_t i = 0; i < sample.inputs.size(); ++i) {
      buffers.emplace_back(sample.inputs[i].dtype(), sample.dims[i], shift);
      if (buffers.back().bytes > 0) {
        std::memcpy(buffers.back().data, sample.inputs[i].data(), buffers.back().bytes);
      }
      in.push_back(buffers.back().data);
    }
    for (size_t k = 0; k < sample.program.outputs.size(); ++k) {
      buffers.emplace_back(sample.program.outputs[k].dtype, dims_of_output(sample, k), shift);
      out.push_back(buffers.back().data);
    }
  }
  std::vector<Buffer> buffers;
  std::vector<const void*> in;
  std::vector<void*> out;
};

void expect_equal(const ExprSample& sample, const Operands& actual, const Operands& expected) {
  for (size_t k = 0; k < sample.program.outputs.size(); ++k) {
    const DType type = sample.program.outputs[k].dtype;
    double tolerance = sample.tolerance;
    if (tolerance > 0 && type == DType::bf16) tolerance = 1e-2;
    if (tolerance > 0 && type == DType::f16) tolerance = 2e-3;
    dispatch_all(type, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (int64_t i = 0; i < num_elements(dims_of_output(sample, k)); ++i) {
        const ComputeType<T> a = static_cast<const T*>(actual.out[k])[i];
        const ComputeType<T> e = static_cast<const T*>(expected.out[k])[i];
        if (a == e || (a != a && e != e)) continue;
        const double difference = std::abs(static_cast<double>(a) - static_cast<double>(e));
        const double scale = std::max(1.0, std::abs(static_cast<double>(e)));
        ASSERT_LE(difference, tolerance * scale) << sample.name << ": output " << k << " element "
                                                 << i << " is " << +a << ", not " << +e << "\n"
                                                 << sample.program.text();
      }
    });
  }
}

Operands reference(const ExprSample& sample) {
  Operands operands(sample, 0);
  const ExprInterpreter interpreter(sample.program, sample.dims);
  void* workspace = nullptr;
  const TensorData owner = TensorData::allocate(
      DType::u8, {static_cast<int64_t>(interpreter.workspace_bytes().value())}, &workspace);
  interpreter.run(operands.in.data(), operands.out.data(), workspace);
  return operands;
}

void run(const ExprKernelPlan& plan, const LoadedKernel& kernel, const Operands& operands,
         Fault* fault) {
  std::vector<uint64_t> words(plan.argument_words());
  plan.write_arguments(operands.in.data(), operands.out.data(), fault, 3, words.data());
  kernel.launch(plan.blocks(), plan.threads(), nullptr, words.data());
}

// Prints all samples, compiles them in a few pieces with the host's compiler, and compares.
void check_samples(const std::vector<ExprSample>& samples, size_t shift) {
  static const SourceCompiler compiler = host_source_compiler("c++");
  constexpr size_t kPiece = 60;
  std::vector<ExprKernelPlan> plans;
  std::vector<ExprSource> sources;
  for (const ExprSample& sample : samples) {
    plans.emplace_back(sample.program, sample.dims, shift == 0);
    sources.push_back(print_source(plans.back()));
  }
  std::map<std::string, std::string> texts;
  for (const ExprSource& source : sources) texts[source.entry] = source.text;
  std::map<std::string, KernelJob> jobs;
  for (auto next = texts.begin(); next != texts.end();) {
    std::string piece(expr_prelude());
    std::vector<std::string> entries;
    for (; next != texts.end() && entries.size() < kPiece; ++next) {
      piece += next->second;
      entries.push_back(next->first);
    }
    const auto code = std::make_shared<std::shared_future<std::string>>(
        std::async(std::launch::async, [piece] { return compiler.compile(piece); }).share());
    for (const std::string& entry : entries) {
      jobs[entry] = std::async(std::launch::deferred, [code, entry] {
                      return CompiledKernel{compiler.load(code->get(), entry), {}};
                    }).share();
    }
  }
  for (size_t i = 0; i < samples.size(); ++i) {
    const Operands operands(samples[i], shift);
    EXPECT_EQ(ExprKernelPlan::why_not(samples[i].program, samples[i].dims), std::nullopt);
    ASSERT_TRUE(plans[i].takes(operands.in.data(), operands.out.data())) << samples[i].name;
    Fault fault;
    run(plans[i], *jobs.at(sources[i].entry).get().kernel, operands, &fault);
    EXPECT_FALSE(is_raised(fault)) << samples[i].name;
    expect_equal(samples[i], operands, reference(samples[i]));
    for (const Buffer& buffer : operands.buffers) {
      EXPECT_TRUE(buffer.kept_its_end()) << samples[i].name;
    }
    if (::testing::Test::HasFatalFailure()) {
      ADD_FAILURE() << sources[i].text;
      return;
    }
  }
}

TEST(ExprSource, FusedCasesEqualTheInterpreter) { check_samples(case_samples(true), 0); }

TEST(ExprSource, ElementwiseCasesEqualTheInterpreter) { check_samples(case_samples(false), 0); }

TEST(ExprSource, RandomProgramsEqualTheInterpreter) { check_samples(random_samples(6), 0); }

TEST(ExprSource, OperandsThatAreNotAlignedAreReadOneByOne) { check_samples(random_samples(1), 1); }

TEST(ExprSource, RandomProgramsHaveAllOperationsAndTypes) {
  std::set<ExprOp> ops;
  std::set<DType> types;
  for (const ExprSample& sample : random_samples(6)) {
    for (const ExprInstruction& instruction : sample.program.code) {
      ops.insert(instruction.op);
      types.insert(instruction.dtype);
    }
  }
  EXPECT_EQ(ops.size(), static_cast<size_t>(kExprOpCount));
  EXPECT_EQ(types.size(), 13u);
}

TEST(InterpretedProgram, EqualsTheInterpreterOfTheHost) {
  for (const ExprSample& sample : random_samples(12)) {
    if (InterpretedProgram::why_not(sample.program, sample.dims)) continue;
    const Operands operands(sample, 0);
    const InterpretedProgram program(sample.program, sample.dims, device(0));
    Fault fault;
    program.run(operands.in.data(), operands.out.data(),
                {.in = nullptr, .out = nullptr, .workspace = nullptr, .fault = &fault});
    EXPECT_FALSE(is_raised(fault)) << sample.name;
    expect_equal(sample, operands, reference(sample));
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST(InterpretedProgram, SaysWhyNot) {
  std::string body = "expr 1\n";
  for (int i = 0; i < 130; ++i) body += str("%", i, " = input float32\n");
  const ExprProgram program = ExprProgram::parse(body + "output %0 float32\n");
  EXPECT_THAT(InterpretedProgram::why_not(program, std::vector<Dims>(130, Dims{2})).value_or(""),
              ::testing::HasSubstr("131 operands"));
}

TEST(ExprSource, HasNoMeanOfIntegers) {
  for (const char* type : {"int8", "int32", "int64"}) {
    const ExprProgram program = ExprProgram::parse(
        str("expr 1\n%0 = input ", type, "\n%1 = row_mean ", type, " %0\noutput %1 ", type, "\n"));
    const std::vector<Dims> dims{{2, 4}};
    EXPECT_THAT(ExprKernelPlan::why_not(program, dims).value_or(""), ::testing::HasSubstr(type));
    EXPECT_THAT(InterpretedProgram::why_not(program, dims).value_or(""),
                ::testing::HasSubstr(type));
  }
}

const char* const kDivision =
    "expr 1\n%0 = input int32\n%1 = input int32\n%2 = floor_div int32 %0 %1\noutput %2 int32\n";

ExprSample division_by_zero() {
  ExprSample sample{"division", ExprProgram::parse(kDivision), {{300}, {300}}, {}};
  for (int i = 0; i < 2; ++i) {
    void* data = nullptr;
    sample.inputs.push_back(TensorData::allocate(DType::i32, {300}, &data));
    for (int k = 0; k < 300; ++k) static_cast<int32_t*>(data)[k] = i == 1 && k == 77 ? 0 : k + 1;
  }
  return sample;
}

TEST(ExprSource, ReportsDivisionByZero) {
  const SourceCompiler compiler = host_source_compiler("c++");
  const ExprSample sample = division_by_zero();
  const ExprKernelPlan plan(sample.program, sample.dims, true);
  const ExprSource source = print_source(plan);
  const auto kernel =
      compiler.load(compiler.compile(str(expr_prelude(), source.text)), source.entry);
  const Operands operands(sample, 0);
  Fault fault;
  run(plan, *kernel, operands, &fault);
  EXPECT_EQ(fault.kind, FaultKind::division);
  EXPECT_EQ(fault.step, 3u);
  EXPECT_EQ(static_cast<const int32_t*>(operands.out[0])[78], 1);
  run(plan, *kernel, operands, nullptr);  // nobody wants to know
}

TEST(ExprSource, OutputsTakeTheMemoryOfInputs) {
  // Both outputs lie on inputs that both of them read; rows are reduced before.
  const char* const programs[] = {
      "expr 1\n%0 = input float32\n%1 = input float32\n%2 = add float32 %0 %1\n%3 = mul float32 "
      "%0 %1\n%4 = sub float32 %2 %3\noutput %2 float32\noutput %4 float32\n",
      "expr 1\n%0 = input float32\n%1 = input float32\noutput %1 float32\noutput %0 float32\n",
      "expr 1\n%0 = input float32\n%1 = input float32\n%2 = row_max float32 %0\n%3 = row_min "
      "float32 %1\n%4 = sub float32 %0 %3\n%5 = sub float32 %1 %2\noutput %4 float32\noutput %5 "
      "float32\n"};
  static const SourceCompiler compiler = host_source_compiler("c++");
  for (const char* text : programs) {
    for (const int64_t columns : {3, 64, 3001, 40000}) {
      ExprSample sample{"in place", ExprProgram::parse(text), {{3, columns}, {3, columns}}, {}};
      const testing::CaseInput input{.dtype = DType::f32, .dims = {3, columns}};
      sample.inputs = testing::make_inputs({.op = "Add", .inputs = {input, input}}, DType::f32);
      const Operands expected = reference(sample);
      const ExprKernelPlan plan(sample.program, sample.dims, true);
      const ExprSource source = print_source(plan);
      const KernelJob job =
          compile_kernel(compiler, str(expr_prelude(), source.text), source.entry);
      const InterpretedProgram interpreted(sample.program, sample.dims, device(0));
      for (const bool generated : {true, false}) {
        Operands operands(sample, 0);
        for (size_t k = 0; k < 2; ++k) operands.out[k] = const_cast<void*>(operands.in[k]);
        if (generated) {
          run(plan, *job.get().kernel, operands, nullptr);
        } else {
          interpreted.run(operands.in.data(), operands.out.data(),
                          {.in = nullptr, .out = nullptr, .workspace = nullptr});
        }
        expect_equal(sample, operands, expected);
      }
    }
  }
}

TEST(ExprKernels, OutputsTakeTheMemoryOfInputsThatTheyWaitFor) {
  // The gradient of a norm with its residual: %4 is the product of two inputs, %6 the sum of the
  // third and what a reduction gave.
  const ExprProgram program = ExprProgram::parse(
      "expr 1\n%0 = input float32\n%1 = input float32\n%2 = input float32\n%3 = mul float32 %0 "
      "%1\n%4 = row_sum float32 %3\n%5 = mul float32 %0 %4\n%6 = add float32 %2 %5\noutput %3 "
      "float32\noutput %6 float32\n");
  const TensorSpec rows{DType::f32, {3, 64}};
  const Node node{.op = "Fused", .domain = std::string(kOrtrainDomain), .name = "layer"};
  const NodeSpec spec(op_registry().get(node.domain, node.op), node, {rows, rows, rows},
                      {rows, rows}, {});
  for (const Kernel& kernel : expr_kernels([&](const NodeSpec&) { return program; }, device(0))) {
    const std::vector<std::pair<int, int>> pairs = kernel.inplace_of(spec);
    EXPECT_THAT(pairs, ElementsAre(Pair(0, 0), Pair(0, 1), Pair(1, 0), Pair(1, 1), Pair(2, 1)))
        << kernel.name;
  }
}

TEST(ExprSource, ManyShapesShareAKernel) {
  const ExprProgram program = ExprProgram::parse(
      "expr 1\n%0 = input float32\n%1 = input float32\n%2 = add float32 %0 %1\n%3 = relu float32 "
      "%2\noutput %3 float32\n");
  const auto text = [&](std::vector<Dims> dims) {
    return print_source(ExprKernelPlan(program, dims, true)).text;
  };
  const std::string bias = text({{8, 128, 768}, {768}});
  EXPECT_EQ(bias, text({{3, 64}, {64}}));
  EXPECT_EQ(bias, text({{2, 5, 7, 3072}, {3072}}));
  EXPECT_NE(bias, text({{3, 63}, {63}}));                  // no vectors
  EXPECT_NE(bias, text({{3, 64}, {3, 1}}));                // another pattern
  EXPECT_NE(bias, text({{1 << 16, 1 << 16}, {1 << 16}}));  // 64-bit indices
  EXPECT_EQ(text({{7}, {7}}), text({{2, 3}, {2, 3}}));
}

TEST(ExprSource, LayersShareAKernelWhateverTheyDraw) {
  const auto text = [](const std::string& seed, const char* first, const char* second) {
    const ExprProgram program = ExprProgram::parse(
        str("expr 1\n%0 = input float32\n%1 = ", seed, "\n%2 = dropout float32 %0 %1 ", first,
            "\n%3 = dropout_mask bool %1 ", second, "\noutput %2 bfloat16\noutput %3 bool\n"));
    std::vector<Dims> dims{{64, 32}};
    if (program.num_inputs() == 2) dims.emplace_back();
    return print_source(ExprKernelPlan(program, dims, true)).text;
  };
  const std::string one = text("input int64", "ratio 0.1 stream 3", "ratio 0.1 stream 3");
  EXPECT_EQ(one, text("input int64", "ratio 0.1 stream 70", "ratio 0.1 stream 70"));
  // Words of two streams.
  EXPECT_NE(one, text("input int64", "ratio 0.1 stream 3", "ratio 0.1 stream 4"));
  EXPECT_EQ(text("input int64", "ratio 0.1 stream 3", "ratio 0.2 stream 4"),
            text("input int64", "ratio 0.1 stream 9", "ratio 0.2 stream 1"));
  EXPECT_EQ(text("constant int64 5", "ratio 0.1 stream 3", "ratio 0.1 stream 3"),
            text("constant int64 6", "ratio 0.1 stream 3", "ratio 0.1 stream 3"));
}

TEST(ExprSource, RowsStayInRegistersWhereTheyFit) {
  const ExprProgram program = ExprProgram::parse(
      "expr 1\n%0 = input bfloat16\n%1 = row_mean float32 %0\n%2 = sub float32 %0 %1\n%3 = mul "
      "float32 %2 %2\n%4 = row_mean float32 %3\n%5 = rsqrt float32 %4\n%6 = mul float32 %2 %5\n"
      "output %6 bfloat16\n");
  using Kind = ExprKernelShape::Kind;
  const auto shape = [&](int64_t columns) {
    return ExprKernelPlan(program, {{64, columns}}, true).shape();
  };
  EXPECT_EQ(shape(128).kind, Kind::warp_rows);
  EXPECT_EQ(shape(768).kind, Kind::warp_rows);
  EXPECT_EQ(shape(768).vector, 8);
  EXPECT_EQ(shape(4096).kind, Kind::block_rows);
  EXPECT_GT(shape(4096).per_thread, 0);
  EXPECT_EQ(shape(1 << 20).per_thread, 0);
  const ExprSchedule schedule(program, merged_axes(program, {{64, 768}}, true));
  EXPECT_EQ(schedule.passes, 3);
  EXPECT_EQ(schedule.kept, (std::vector<ExprReg>{0, 2}));
}

}  // namespace
}  // namespace ortrain::gpu
