// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/gpu/gemm_padded.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "ortrain/base/error.h"
#include "ortrain/gpu/padded_copy.h"
#include "ortrain/gpu/words.h"

namespace ortrain::gpu {
namespace {

std::atomic<bool> pads_always{false};

constexpr int64_t kRowBytes = 16;
constexpr int64_t kLongRowBytes = 128;  // a line of the cache
constexpr int64_t kPieceUnit = 128;     // rows or columns of D; tiles of the library are no higher
constexpr size_t kPlaceUnit = 64;       // of what lies in the workspace

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t size_in(DType type) { return static_cast<int64_t>(size_of(type)); }

// What the library knows of where rows begin.
int alignment_of(std::initializer_list<int64_t> bytes) {
  return common_word(bytes, static_cast<int>(kRowBytes));
}

bool reads_c_by_rows(const GemmProblem& p) { return p.c_column == 1 && p.c_row >= p.n; }

// Rows of C count where the library reads it as it is.
int alignment_of(const GemmProblem& p) {
  const int64_t size = size_in(p.dtype), result_size = size_in(p.result_type());
  int least = alignment_of({p.lda * size, p.ldb * size, p.ldd * result_size});
  const bool has_c = p.beta != 0.0 && reads_c_by_rows(p);
  if (has_c) least = std::min(least, alignment_of({p.c_row * result_size}));
  for (const BatchAxis& axis : p.batch) {
    least = std::min(least, alignment_of({axis.a * size, axis.b * size, axis.d * result_size,
                                          has_c ? axis.c * result_size : 0}));
  }
  return least;
}

// A part of D: some rows, some columns, some members of the batch.
struct Extents {
  int64_t m = 0, n = 0, members = 1;
};

// What is copied for it, and the product of the copies. Extents that are rows of a copied matrix
// are rounded up as well: kernels want whole vectors of the extent that lies side by side.
struct Layout {
  GemmProblem inner;
  std::optional<PaddedCopy> a, b, d;  // d: out of the workspace
  std::optional<PaddedCopy> c, bias;

  Layout(const GemmProblem& p, const Extents& of) : inner(p) {
    const int64_t size = size_in(p.dtype), result_size = size_in(p.result_type());
    const bool k_in_rows = !p.trans_a || p.trans_b;
    inner.m = p.trans_a ? padded_extent(of.m, size) : of.m;
    inner.n = padded_extent(of.n, size);
    inner.k = k_in_rows ? padded_extent(p.k, size) : p.k;
    BatchAxis from, to;
    if (!p.batch.empty()) from = to = p.batch[0];
    from.count = to.count = of.members;
    const auto is_odd = [](int64_t ld, int64_t stride, int64_t bytes) {
      return alignment_of({ld * bytes, stride * bytes}) < kRowBytes;
    };
    const bool more_m = inner.m > of.m, more_n = inner.n > of.n, more_k = inner.k > p.k;
    if (more_m || more_k || is_odd(p.lda, from.a, size)) {
      a = copy_of(p.trans_a ? p.k : of.m, p.trans_a ? of.m : p.k, p.lda, from.count, from.a,
                  p.trans_a ? inner.k : inner.m, p.trans_a ? inner.m : inner.k);
      inner.lda = a->to_ld;
      to.a = a->to_stride;
    }
    if (more_n || more_k || is_odd(p.ldb, from.b, size)) {
      b = copy_of(p.trans_b ? of.n : p.k, p.trans_b ? p.k : of.n, p.ldb, from.count, from.b,
                  p.trans_b ? inner.n : inner.k, p.trans_b ? inner.k : inner.n);
      inner.ldb = b->to_ld;
      to.b = b->to_stride;
    }
    const bool c_by_rows = p.beta != 0.0 && reads_c_by_rows(p);
    if (more_m || more_n || is_odd(p.ldd, from.d, result_size) ||
        (c_by_rows && is_odd(p.c_row, from.c, result_size))) {
      inner.ldd = inner.c_row = inner.n;
      inner.c_column = 1;
      to.c = to.d = of.members > 1 ? inner.m * inner.n : 0;
      d = PaddedCopy{.count = of.members,
                     .from_rows = of.m,
                     .from_columns = of.n,
                     .from_ld = inner.n,
                     .from_stride = to.d,
                     .rows = of.m,
                     .columns = of.n,
                     .to_ld = p.ldd,
                     .to_stride = from.d};
      if (c_by_rows) {
        c = copy_of(of.m, of.n, p.c_row, of.members, from.c, inner.m, inner.n);
        c->count = of.members;
        c->to_stride = to.d;
      }
    }
    const bool of_rows = p.bias == BiasAlong::rows;
    if ((p.bias == BiasAlong::columns && more_n) || (of_rows && more_m)) {
      const int64_t length = of_rows ? of.m : of.n;
      bias = copy_of(1, length, length, 1, 0, 1, of_rows ? inner.m : inner.n);
    }
    inner.batch.clear();
    if (of.members > 1) inner.batch.push_back(to);
  }

  // To dense matrices; one where the batch shares it.
  static PaddedCopy copy_of(int64_t from_rows, int64_t from_columns, int64_t ld, int64_t count,
                            int64_t stride, int64_t rows, int64_t columns) {
    const bool shared = count == 1 || stride == 0;
    return {.count = shared ? 1 : count,
            .from_rows = from_rows,
            .from_columns = from_columns,
            .from_ld = ld,
            .from_stride = shared ? 0 : stride,
            .rows = rows,
            .columns = columns,
            .to_ld = columns,
            .to_stride = shared ? 0 : rows * columns};
  }

  ByteCount bytes(const std::optional<PaddedCopy>& copy) const {
    if (!copy) return {};
    return ByteCount::of(size_of(inner.dtype), copy->count, copy->rows, copy->columns)
        .rounded_up(kPlaceUnit);
  }
  ByteCount a_bytes() const { return bytes(a); }
  ByteCount b_bytes() const { return bytes(b); }
  ByteCount bias_bytes() const { return bytes(bias); }
  ByteCount d_bytes() const { return d ? dense_d() : ByteCount(); }
  ByteCount dense_d() const {
    return ByteCount::of(size_of(inner.result_type()),
                         inner.batch.empty() ? 1 : inner.batch[0].count, inner.m, inner.n)
        .rounded_up(kPlaceUnit);
  }
};

enum class Along { m, n, batch };

// How D is cut.
struct Pieces {
  Along along = Along::m;
  int64_t extent = 0;  // of what is cut
  int64_t step = 0;    // of each piece but the last

  Extents at(const GemmProblem& p, int64_t begin) const {
    const int64_t size = std::min(step, extent - begin);
    if (along == Along::batch) return {p.m, p.n, size};
    return along == Along::m ? Extents{size, p.n, 1} : Extents{p.m, size, 1};
  }
};

// As few pieces as memory allows, of about one size.
std::optional<Pieces> pieces_of(const GemmProblem& p, int64_t most_bytes, std::string& why) {
  Pieces pieces;
  const auto bytes_in = [](ByteCount bytes) { return static_cast<int64_t>(bytes.value()); };
  int64_t unit = kPieceUnit;
  ByteCount shared, own;  // of all pieces; of `unit` in each
  if (p.batch.empty()) {
    const Layout all(p, {p.m, p.n, 1});
    pieces.along = bytes_in(all.b_bytes()) <= most_bytes ? Along::m : Along::n;
    const bool by_m = pieces.along == Along::m;
    pieces.extent = by_m ? p.m : p.n;
    shared = by_m ? all.b_bytes() : all.a_bytes();
    // The last piece may need a copy where the others write D at once.
    const auto cut = [&](int64_t size) {
      return Layout(p, by_m ? Extents{size, p.n, 1} : Extents{p.m, size, 1});
    };
    const Layout full = cut(unit), last = cut(pieces.extent % unit);
    own = by_m ? full.a_bytes() : full.b_bytes();
    if (full.d || last.d) own += full.dense_d();
  } else {
    unit = 1;
    pieces.along = Along::batch;
    pieces.extent = p.batch[0].count;
    const Layout one(p, {p.m, p.n, 1});
    for (const auto& [bytes, stride] :
         {std::pair{one.a_bytes(), p.batch[0].a}, {one.b_bytes(), p.batch[0].b}}) {
      (stride == 0 ? shared : own) += bytes;
    }
    own += one.d_bytes();
  }
  const int64_t units = bytes_in(own) == 0 ? ceil_div(pieces.extent, unit)
                                           : most_bytes / std::max<int64_t>(bytes_in(own), 1);
  if (bytes_in(shared) > most_bytes || units == 0) {
    why = str("copies with even rows take more than ", most_bytes, " bytes");
    return std::nullopt;
  }
  const int64_t count = ceil_div(pieces.extent, units * unit);
  pieces.step = std::min(ceil_div(ceil_div(pieces.extent, count), unit), units) * unit;
  return pieces;
}

// A piece as it is run. `otherwise` takes what the library refuses when it sees the addresses.
struct Piece {
  Layout layout;
  GemmKernel kernel, otherwise;
};

struct PaddedGemm {
  GemmProblem problem;
  Pieces pieces;
  std::vector<Piece> kinds;  // of all pieces but the last, and that
  ByteCount a_bytes, b_bytes, d_bytes, bias_bytes, kernel_bytes;

  PaddedGemm(const GemmProblem& p, const Pieces& cut) : problem(p), pieces(cut) {}

  bool add_kind(int64_t begin, std::string& why) {
    Layout layout(problem, pieces.at(problem, begin));
    std::optional<GemmKernel> kernel = library_gemm(layout.inner, why);
    if (!kernel) return false;
    Piece piece{std::move(layout), std::move(*kernel), {}};
    piece.otherwise = tiled_gemm(piece.layout.inner);
    a_bytes = std::max(a_bytes, piece.layout.a_bytes());
    b_bytes = std::max(b_bytes, piece.layout.b_bytes());
    d_bytes = std::max(d_bytes, piece.layout.d_bytes());
    bias_bytes = std::max(bias_bytes, piece.layout.bias_bytes());
    kernel_bytes =
        std::max({kernel_bytes, piece.kernel.workspace_bytes, piece.otherwise.workspace_bytes});
    kinds.push_back(std::move(piece));
    return true;
  }
  ByteCount bytes() const { return a_bytes + b_bytes + d_bytes + bias_bytes + kernel_bytes; }

  void run(const GemmOperands& operands, void* workspace, void* stream) const {
    for (int64_t begin = 0; begin < pieces.extent; begin += pieces.step) {
      const bool is_last = begin + pieces.step >= pieces.extent;
      run_piece(is_last ? kinds.back() : kinds.front(), begin, operands,
                static_cast<char*>(workspace), stream);
    }
  }

 private:
  // The operands of the piece, where they are.
  GemmOperands part(const GemmOperands& all, int64_t begin) const {
    const GemmProblem& p = problem;
    const int64_t size = size_in(p.dtype), result_size = size_in(p.result_type());
    const int64_t m = pieces.along == Along::m ? begin : 0;
    const int64_t n = pieces.along == Along::n ? begin : 0;
    BatchAxis at;
    if (pieces.along == Along::batch) {
      const BatchAxis& axis = p.batch[0];
      at = {1, begin * axis.a, begin * axis.b, begin * axis.c, begin * axis.d};
    }
    GemmOperands own = all;
    own.a = moved(all.a, (at.a + (p.trans_a ? m : m * p.lda)) * size);
    own.b = moved(all.b, (at.b + (p.trans_b ? n * p.ldb : n)) * size);
    own.c = moved(all.c, (at.c + m * p.c_row + n * p.c_column) * result_size);
    own.d = moved(all.d, (at.d + m * p.ldd + n) * result_size);
    own.bias = moved(all.bias, (p.bias == BiasAlong::rows ? m : n) * size);
    own.aux = own.bias_gradient = nullptr;
    return own;
  }

  // What all pieces share is copied for the first.
  bool is_shared(bool is_a) const {
    if (pieces.along == Along::batch) return (is_a ? problem.batch[0].a : problem.batch[0].b) == 0;
    return pieces.along == (is_a ? Along::n : Along::m);
  }

  void run_piece(const Piece& piece, int64_t begin, const GemmOperands& all, char* workspace,
                 void* stream) const {
    const Layout& layout = piece.layout;
    const size_t size = size_of(problem.dtype), result_size = size_of(problem.result_type());
    const GemmOperands from = part(all, begin);
    GemmOperands operands = from;
    char* const a = workspace;
    char* const b = a + a_bytes.value();
    char* const d = b + b_bytes.value();
    char* const bias = d + d_bytes.value();
    void* const rest = bias + bias_bytes.value();
    if (layout.a) {
      if (begin == 0 || !is_shared(true)) copy_padded(*layout.a, size, from.a, a, stream);
      operands.a = a;
    }
    if (layout.b) {
      if (begin == 0 || !is_shared(false)) copy_padded(*layout.b, size, from.b, b, stream);
      operands.b = b;
    }
    if (layout.bias) {
      copy_padded(*layout.bias, size, from.bias, bias, stream);
      operands.bias = bias;
    }
    if (layout.d) {
      operands.d = d;
      if (problem.beta != 0.0) {
        put_addend(layout, from.c, d, stream);
        operands.c = d;
      }
    }
    if (!piece.kernel.run(operands, rest, stream)) {
      check(piece.otherwise.run(operands, rest, stream), "tiles take everything");
    }
    if (layout.d) copy_padded(*layout.d, result_size, d, from.d, stream);
  }

  void put_addend(const Layout& layout, const void* c, void* d, void* stream) const {
    if (layout.c) return copy_padded(*layout.c, size_of(problem.result_type()), c, d, stream);
    GemmProblem addend = layout.inner;
    addend.m = layout.d->rows;
    addend.n = layout.d->columns;
    addend.c_row = problem.c_row;
    addend.c_column = problem.c_column;
    for (BatchAxis& axis : addend.batch) axis.c = problem.batch[0].c;
    spread_addend(addend, {.d = d, .c = c}, stream);
  }
};

}  // namespace

int64_t padded_extent(int64_t extent, int64_t element_size) {
  if (extent * element_size % kRowBytes == 0) return extent;
  const bool is_long = extent * element_size >= 64 * kLongRowBytes;  // 2 % more at most
  const int64_t unit = (is_long ? kLongRowBytes : kRowBytes) / element_size;
  return ceil_div(extent, unit) * unit;
}

// By what an H100 does: 60 TFLOP/s by cuBLASLt's kernels for rows at any multiple of 2 bytes, 600
// for those at multiples of 16 (in between: guesses), TF32 half of it; 2.5 TB/s by copies; 5 us for
// each launch more. Other devices have about the same proportions.
bool padding_pays(double work, int alignment, double bytes, double launches, DType dtype) {
  constexpr double kBytesPerSecond = 2.5e12, kLaunch = 5e-6, kMargin = 0.9;
  const bool is_half = size_of(dtype) == 2, is_tf32 = dtype == DType::f32 && allow_tf32();
  if ((!is_half && !is_tf32) || alignment >= kRowBytes) return false;
  if (pads_always) return true;
  const double fast = is_half ? 600e12 : 300e12, slow = fast / 10;
  const double direct = work / (slow * std::max(1, alignment / 2));
  return work / fast + bytes / kBytesPerSecond + launches * kLaunch < kMargin * direct;
}

bool padding_pays(const GemmProblem& p) {
  if (p.batch.size() > 1 || p.k == 0) return false;
  const int64_t members = p.batch.empty() ? 1 : p.batch[0].count;
  const Layout layout(p, {p.m, p.n, members});
  double bytes = 0, launches = 0;
  const auto count = [&](const std::optional<PaddedCopy>& copy, DType type, double times = 1) {
    if (!copy) return;
    const double elements = static_cast<double>(copy->from_rows * copy->from_columns) +
                            static_cast<double>(copy->rows * copy->columns);
    bytes +=
        times * elements * static_cast<double>(copy->count) * static_cast<double>(size_of(type));
    launches += times;
  };
  count(layout.a, p.dtype);
  count(layout.b, p.dtype);
  // C is copied, too; and an activation is a pass then, which reads and writes D.
  const int passes = (p.beta != 0.0 ? 1 : 0) + (p.activation != Activation::none ? 1 : 0);
  count(layout.d, p.result_type(), 1 + passes);
  const double work = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) *
                      static_cast<double>(p.k) * static_cast<double>(members);
  return padding_pays(work, alignment_of(p), bytes, launches, p.dtype);
}

void set_always_padding(bool always) { pads_always = always; }

std::optional<GemmKernel> padded_gemm(const GemmProblem& p, int64_t most_bytes, std::string& why) {
  check(p.activation == Activation::none && !p.bias_gradient, "a product alone");
  const size_t size = size_of(p.dtype);
  if (!is_float(p.dtype) || size > 4 || p.batch.size() > 1 || p.k == 0) {
    why = "rows are padded of 16-bit and 32-bit floats, with one axis of a batch at most";
    return std::nullopt;
  }
  const std::optional<Pieces> pieces = pieces_of(p, most_bytes, why);
  if (!pieces) return std::nullopt;
  const auto gemm = std::make_shared<PaddedGemm>(p, *pieces);
  const int64_t last = (ceil_div(pieces->extent, pieces->step) - 1) * pieces->step;
  if (!gemm->add_kind(0, why)) return std::nullopt;
  if (last > 0 && !gemm->add_kind(last, why)) return std::nullopt;
  return GemmKernel{.name = "cublaslt_padded",
                    .workspace_bytes = gemm->bytes(),
                    .run = [gemm](const GemmOperands& operands, void* workspace, void* stream) {
                      gemm->run(operands, workspace, stream);
                      return true;
                    }};
}

}  // namespace ortrain::gpu
