// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <vector>

#include "ortrain/cpu/tile_program.h"

namespace ortrain::cpu {

// Fills a TileProgram. Private to tile_program.cpp and tile_compiler.cpp.
class TileCompiler {
 public:
  TileCompiler(const ExprProgram& program, const std::vector<Dims>& inputs, TileProgram& target);
  void compile();

 private:
  using Slot = TileProgram::Slot;
  using Step = TileProgram::Step;
  struct Buffer {
    ExprExtent extent;
    bool lasting;  // written once per range
  };

  // Geometry: merges axes, chooses the tile.
  void find_axes(const std::vector<Dims>& inputs);
  void choose_tile();
  void choose_workers();
  // Registers.
  void mark_needed();
  void place_input(ExprReg reg);
  void place_constant(ExprReg reg);
  void compile_instruction(ExprReg reg);
  void store_outputs();
  int result_slot(ExprReg reg, ExprExtent extent);
  int full_slot(ExprReg reg);  // with one value per element, spread if need be
  int new_buffer(ExprExtent extent, size_t bytes, bool lasting);
  int new_slot(Slot slot);
  void add_step(Step step, bool once);
  // Memory of the buffers, reused after the last reader.
  void assign_buffers();

  ExprExtent extent(ExprReg reg) const { return extents_[static_cast<size_t>(reg)]; }
  const ExprInstruction& code(ExprReg reg) const { return program_.code[static_cast<size_t>(reg)]; }

  const ExprProgram& program_;
  TileProgram& target_;
  bool keep_rows_ = false;           // the last axis must stay the column
  std::vector<ExprExtent> extents_;  // as the shapes make them
  std::vector<bool> needed_;
  std::vector<int> slot_of_;  // per register, -1: none yet
  std::vector<int> spread_of_;
  std::map<int, Buffer> buffers_;  // by slot
  ExprReg last_read_ = -1;         // last instruction that reads a tensor
};

}  // namespace ortrain::cpu
