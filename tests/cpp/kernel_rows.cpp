// Kernels that add, scale and copy rows, run by the emulator: every byte is that of the CPU
// backend, for every dtype, number of rows, size, alignment and shape of the grid. Prints "ok", or
// what differs. An argument names a fault of the kernels to switch on (tests/schedules/faults).

#include <sys/mman.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpu/row_kernels.h"
#include "kernel_rows.h"
#include "kernels/combine.h"
#include "kernels/strided_copy.h"
#include "layout/strided.h"
#include "simt/grid.h"

namespace {
const char* g_fault = "";
}

bool moe::simt::is_fault_on(const char* name) {
  return std::strcmp(name, g_fault) == 0;
}

namespace {

using namespace moe;
using namespace moe::kernel_rows;
using layout::Slot;

/// Numbers of all kinds: any bits, subnormals, infinities, NaNs with payload, zeros of both signs,
/// and plain ones of like size, whose sums round.
void fill_numbers(DType dtype, std::byte* data, int64_t count) {
  const auto put = [&](int64_t i, uint64_t bits) {
    const auto bytes = static_cast<size_t>(element_bytes(dtype));
    std::memcpy(data + i * static_cast<int64_t>(bytes), &bits, bytes);
  };
  const int width = static_cast<int>(element_bytes(dtype)) * 8;
  const uint64_t all = width == 64 ? ~0ull : (1ull << width) - 1;
  for (int64_t i = 0; i < count; ++i) {
    const double plain = static_cast<double>(draw(1 << 20)) / (1 << 18) - 2.0;
    uint64_t bits = 0;
    switch (dtype) {
      case DType::kBFloat16:
        bits = float_to_bfloat16(static_cast<float>(plain));
        break;
      case DType::kFloat16:
        bits = float_to_float16(static_cast<float>(plain));
        break;
      case DType::kFloat32:
        bits = std::bit_cast<uint32_t>(static_cast<float>(plain));
        break;
      default:
        bits = std::bit_cast<uint64_t>(plain);
    }
    const uint64_t sign = draw(2) ? 1ull << (width - 1) : 0;
    switch (draw(24)) {
      case 0:
        bits = g_random() & all;
        break;
      case 1:
      case 2:
        bits = sign | (g_random() & 0x3F);  // subnormal
        break;
      case 3:
        bits = sign;
        break;
      default:
        break;
    }
    put(i, bits);
  }
}

/// The smallest world in which combine runs: every rank's control area, rows here and there.
struct World {
  explicit World(int num_ranks)
      : num_ranks(num_ranks),
        workspaces(layout::Workspace::bytes(num_ranks, 1, 2) * num_ranks),
        state(sizeof(kernels::BufferState)),
        peers(static_cast<int64_t>(sizeof(kernels::Peer)) * num_ranks) {
    std::memset(workspaces.data(), 0, static_cast<size_t>(workspaces.bytes()));
    std::memset(state.data(), 0, sizeof(kernels::BufferState));
    std::memset(peers.data(), 0, static_cast<size_t>(peers.bytes()));
    for (int rank_idx = 0; rank_idx < num_ranks; ++rank_idx) {
      bases.push_back(workspaces.data() + layout::Workspace::bytes(num_ranks, 1, 2) * rank_idx);
      is_active.push_back(1);
    }
    buffer.num_ranks = num_ranks;
    buffer.num_experts = 1;
    buffer.depth = 2;
    buffer.workspaces = bases.data();
    buffer.is_active = is_active.data();
    buffer.state = state.as<kernels::BufferState>();
    buffer.abort_word = &abort_word;
    buffer.stall_limit_ns = 1'000'000'000;
    tables.epoch = &epoch;
    tables.may_move = &may_move;
    tables.peers = peers.as<kernels::Peer>();
    tables.status = status;
  }

  bool is_done_raised(int rank_idx) const {
    return buffer.workspace(bases[static_cast<size_t>(rank_idx)]).done(epoch, 0).epoch == epoch;
  }

  int num_ranks;
  Guarded workspaces;
  Guarded state;
  Guarded peers;
  std::vector<std::byte*> bases;
  std::vector<uint8_t> is_active;
  uint32_t abort_word = 0;
  uint64_t epoch = 7;
  int32_t may_move = 1;
  int32_t status[2] = {};
  kernels::Buffer buffer;
  kernels::Tables tables;
};

struct CombineCase {
  DType dtype;
  int num_topk;
  int64_t hidden;
  bool is_weighted;
  int weight_bytes;
  bool is_plain;
  int64_t misalignment;

  std::string text() const {
    return concat("combine of ",
                  dtype_name(dtype),
                  ", ",
                  num_topk,
                  " rows of ",
                  hidden,
                  is_weighted ? ", weighted by " : ", ",
                  is_weighted ? weight_bytes : 0,
                  " bytes, plain ",
                  is_plain,
                  ", misaligned by ",
                  misalignment);
  }
};

void check_combine(const CombineCase& c) {
  World world(3);
  const int64_t num_tokens = draw(12);
  const int64_t rows_per_rank = 6;
  const int64_t row_bytes = c.hidden * element_bytes(c.dtype);
  std::vector<Guarded> rows;
  for (int rank_idx = 0; rank_idx < world.num_ranks; ++rank_idx) {
    rows.emplace_back(rows_per_rank * row_bytes, c.misalignment);
    fill_numbers(c.dtype, rows.back().data(), rows_per_rank * c.hidden);
    world.tables.peers[rank_idx].rows = rows.back().data();
    world.tables.peers[rank_idx].is_sent_to = 1;
  }
  std::vector<int64_t> slots(static_cast<size_t>(num_tokens * c.num_topk));
  for (auto& slot : slots)
    slot = draw(5) == 0 ? Slot::kNone
                        : Slot::pack(static_cast<int>(draw(world.num_ranks)), draw(rows_per_rank));
  Guarded weights(num_tokens * c.num_topk * c.weight_bytes);
  fill_numbers(c.weight_bytes == 8 ? DType::kFloat64 : DType::kFloat32,
               weights.data(),
               num_tokens * c.num_topk);
  const Guarded sums(num_tokens * row_bytes, c.misalignment);
  const Guarded want(num_tokens * row_bytes, c.misalignment);

  kernels::CombineParams params;
  params.buffer = world.buffer;
  params.tables = world.tables;
  params.dtype = c.dtype;
  params.hidden = c.hidden;
  params.num_tokens = num_tokens;
  params.num_topk = c.num_topk;
  params.num_slots = c.num_topk;
  params.slots = slots.data();
  params.weights = c.is_weighted ? weights.data() : nullptr;
  params.weight_bytes = c.weight_bytes;
  params.sums = sums.data();
  params.is_plain = c.is_plain ? 1 : 0;
  device::Launch launch = draw_launch();
  launch.shared_bytes = kernels::combine_shared_bytes(params, launch.num_threads);
  kernels::launch_combine(launch, params);

  const cpu::FloatingPointScope scope;
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    std::vector<const std::byte*> src;
    std::vector<float> narrow;
    std::vector<double> wide;
    for (int64_t i = token_idx * c.num_topk; i < (token_idx + 1) * c.num_topk; ++i) {
      const int64_t slot = slots[static_cast<size_t>(i)];
      if (slot == Slot::kNone)
        continue;
      src.push_back(rows[static_cast<size_t>(Slot::rank_idx(slot))].data() +
                    Slot::row_idx(slot) * row_bytes);
      narrow.push_back(c.weight_bytes == 4 ? weights.as<float>()[i] : 0);
      wide.push_back(c.weight_bytes == 4 ? weights.as<float>()[i] : weights.as<double>()[i]);
    }
    const void* factors = c.dtype == DType::kFloat64 ? static_cast<const void*>(wide.data())
                                                     : static_cast<const void*>(narrow.data());
    // An empty vector has no data, which would mean that no weights apply; nor do they.
    cpu::best_row_kernels().sum_rows(c.dtype,
                                     src.data(),
                                     c.is_weighted ? factors : nullptr,
                                     static_cast<int>(src.size()),
                                     c.hidden,
                                     want.data() + token_idx * row_bytes,
                                     cpu::StoreMode::kCached,
                                     nullptr,
                                     0);
  }
  if (!sums.equals(want))
    fail(c.text() + " differs, " + describe(launch));
  if (!sums.is_intact_around())
    fail(c.text() + " writes beyond its sums");
  for (int rank_idx = 0; rank_idx < world.num_ranks; ++rank_idx)
    if (!world.is_done_raised(rank_idx))
      fail(c.text() + " raises no done flag");
}

void check_combines() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64})
    for (int num_topk = 0; num_topk <= 9; ++num_topk)
      for (int repeat = 0; repeat < 6; ++repeat) {
        CombineCase c{};
        c.dtype = dtype;
        c.num_topk = num_topk;
        // Multiples of 16 bytes, odd multiples of 8, and whatever; below and above a piece.
        const int64_t elements = 16 / element_bytes(dtype);
        c.hidden = repeat % 3 == 0   ? elements * (1 + draw(300))
                   : repeat % 3 == 1 ? elements / 2 * (1 + 2 * draw(300))
                                     : 1 + draw(1500);
        c.is_weighted = draw(2) == 1;
        c.weight_bytes = dtype == DType::kFloat64 && draw(2) == 1 ? 8 : 4;
        c.is_plain = draw(2) == 1;
        c.misalignment = draw(3) == 0 ? element_bytes(dtype) * draw(16) : 0;
        check_combine(c);
      }
  // More slots than lanes.
  check_combine({DType::kBFloat16, 40, 136, true, 4, false, 0});
  check_combine({DType::kFloat32, 33, 20, false, 4, true, 0});
}

/// Nothing moves and nobody is told where the exchange, or a kernel before, ended badly.
void check_combine_that_may_not_move() {
  for (const bool has_left : {false, true}) {
    World world(2);
    world.may_move = has_left ? 1 : 0;
    world.state.as<kernels::BufferState>()->has_left = has_left ? 1 : 0;
    const Guarded rows(64);
    const Guarded sums(64);
    const Guarded untouched(64);
    const int64_t slot = Slot::pack(0, 0);
    world.tables.peers[0].rows = rows.data();
    kernels::CombineParams params;
    params.buffer = world.buffer;
    params.tables = world.tables;
    params.hidden = 32;
    params.num_tokens = 1;
    params.num_topk = params.num_slots = 1;
    params.slots = &slot;
    params.sums = sums.data();
    device::Launch launch = draw_launch();
    launch.shared_bytes = kernels::combine_shared_bytes(params, launch.num_threads);
    kernels::launch_combine(launch, params);
    if (!sums.equals(untouched) || world.is_done_raised(0) || world.is_done_raised(1))
      fail("a combine that may not move has moved or told somebody");
  }
}

/// Weights of choices come back from where dispatch put them.
void check_pulled_weights(bool is_by_rank, int bytes) {
  World world(4);
  constexpr int kNumTopk = 5;
  constexpr int kNumRecvTopk = 6;
  constexpr int64_t kRows = 9;
  const int64_t num_tokens = 40;
  const std::vector<int32_t> expert_rank = {0, 0, 1, 1, 1, 3, 3, 0};
  world.buffer.num_experts = static_cast<int32_t>(expert_rank.size());
  world.buffer.expert_rank = expert_rank.data();
  world.buffer.num_experts = 1;  // of the control areas
  std::vector<Guarded> weights;
  for (int rank_idx = 0; rank_idx < world.num_ranks; ++rank_idx) {
    weights.emplace_back(kRows * kNumRecvTopk * bytes);
    for (int64_t i = 0; i < weights.back().bytes(); ++i)
      weights.back().data()[i] = static_cast<std::byte>(draw(256));
    world.tables.peers[rank_idx].weights = weights.back().data();
  }
  const int num_slots = is_by_rank ? 4 : kNumTopk;
  std::vector<int64_t> topk_idx(static_cast<size_t>(num_tokens * kNumTopk));
  std::vector<int64_t> slots(static_cast<size_t>(num_tokens * num_slots), Slot::kNone);
  const Guarded pulled(num_tokens * kNumTopk * bytes);
  const Guarded want(num_tokens * kNumTopk * bytes);
  std::memset(want.data(), 0, static_cast<size_t>(want.bytes()));
  for (int64_t token_idx = 0; token_idx < num_tokens; ++token_idx) {
    int64_t row_of_rank[4] = {-1, -1, -1, -1};
    for (int k = 0; k < kNumTopk; ++k) {
      const int64_t expert_idx = draw(static_cast<int64_t>(expert_rank.size()) + 2) - 2;
      topk_idx[static_cast<size_t>(token_idx * kNumTopk + k)] = expert_idx < 0 ? -1 : expert_idx;
      if (expert_idx < 0)
        continue;
      const int owner = expert_rank[static_cast<size_t>(expert_idx)];
      if (!is_by_rank || row_of_rank[owner] < 0)
        row_of_rank[owner] = draw(kRows);
      const int64_t place = is_by_rank ? row_of_rank[owner] * kNumRecvTopk + k : row_of_rank[owner];
      if (!is_by_rank)
        slots[static_cast<size_t>(token_idx * kNumTopk + k)] =
            Slot::pack(owner, row_of_rank[owner]);
      std::memcpy(want.data() + (token_idx * kNumTopk + k) * bytes,
                  weights[static_cast<size_t>(owner)].data() + place * bytes,
                  static_cast<size_t>(bytes));
    }
    for (int rank_idx = 0, i = 0; is_by_rank && rank_idx < 4; ++rank_idx)
      if (row_of_rank[rank_idx] >= 0)
        slots[static_cast<size_t>(token_idx * num_slots + i++)] =
            Slot::pack(rank_idx, row_of_rank[rank_idx]);
  }
  kernels::CombineParams params;
  params.buffer = world.buffer;
  params.tables = world.tables;
  params.num_tokens = num_tokens;
  params.num_topk = kNumTopk;
  params.num_slots = num_slots;
  params.num_recv_topk = kNumRecvTopk;
  params.arrangement.layout =
      is_by_rank ? layout::RowLayout::kRankMajor : layout::RowLayout::kExpertMajor;
  params.slots = slots.data();
  params.topk_idx = topk_idx.data();
  params.pulled = pulled.data();
  params.pulled_bytes = bytes;
  device::Launch launch = draw_launch();
  launch.shared_bytes = kernels::combine_shared_bytes(params, launch.num_threads);
  kernels::launch_combine(launch, params);
  if (!pulled.equals(want) || !pulled.is_intact_around())
    fail(concat("pulled weights of ", bytes, " bytes differ, by rank ", is_by_rank));
}

void check_weighted_gradient(DType dtype, int weight_bytes, int64_t hidden) {
  const int64_t num_rows = draw(10);
  const int64_t row_bytes = hidden * element_bytes(dtype);
  const Guarded gradient(num_rows * row_bytes, element_bytes(dtype) * draw(8));
  const Guarded want(num_rows * row_bytes);
  const Guarded values(num_rows * row_bytes, element_bytes(dtype) * draw(8));
  const Guarded weights(num_rows * weight_bytes);
  const Guarded dots(num_rows * weight_bytes);
  const Guarded want_dots(num_rows * weight_bytes);
  fill_numbers(dtype, gradient.data(), num_rows * hidden);
  fill_numbers(dtype, values.data(), num_rows * hidden);
  fill_numbers(weight_bytes == 8 ? DType::kFloat64 : DType::kFloat32, weights.data(), num_rows);
  std::memcpy(want.data(), gradient.data(), static_cast<size_t>(want.bytes()));
  kernels::WeightedGradientParams params;
  params.dtype = dtype;
  params.num_rows = num_rows;
  params.hidden = hidden;
  params.gradient = gradient.data();
  params.values = values.data();
  params.weights = weights.data();
  params.dots = dots.data();
  params.weight_bytes = weight_bytes;
  const device::Launch launch = draw_launch();
  kernels::launch_weighted_gradient(launch, params);
  const cpu::FloatingPointScope scope;
  for (int64_t row = 0; row < num_rows; ++row) {
    const double weight = weight_bytes == 8 ? weights.as<double>()[row] : weights.as<float>()[row];
    const double dot = cpu::best_row_kernels().scale_and_dot(
        dtype, want.data() + row * row_bytes, values.data() + row * row_bytes, weight, hidden);
    if (weight_bytes == 8)
      want_dots.as<double>()[row] = dot;
    else
      want_dots.as<float>()[row] = static_cast<float>(dot);
  }
  if (!gradient.equals(want) || !dots.equals(want_dots) || !gradient.is_intact_around() ||
      !dots.is_intact_around())
    fail(concat("weighted gradient of ",
                dtype_name(dtype),
                ", hidden ",
                hidden,
                ", weights of ",
                weight_bytes,
                " bytes differs, ",
                describe(launch)));
}

void check_weighted_gradients() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64})
    for (const int weight_bytes : {4, 8})
      for (const int64_t hidden : {1, 31, 32, 33, 255, 256, 257, 520, 1000})
        check_weighted_gradient(dtype, weight_bytes, hidden);
}

/// Offsets beyond 2^31 bytes, in memory of which few pages are touched.
void check_large_offsets() {
  constexpr int64_t kBytes = int64_t{7} << 30;
  void* const mapped = mmap(nullptr,
                            static_cast<size_t>(kBytes),
                            PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                            -1,
                            0);
  if (mapped == MAP_FAILED)
    fail("no address space for 7 GiB");
  auto* const memory = static_cast<std::byte*>(mapped);

  World world(1);
  constexpr int64_t kHidden = 1024;
  constexpr int64_t kRow = 3'000'001;  // 6.1e9 bytes
  fill_numbers(DType::kBFloat16, memory + kRow * kHidden * 2, kHidden);
  world.tables.peers[0].rows = memory;
  world.tables.peers[0].is_sent_to = 1;
  const int64_t slot = Slot::pack(0, kRow);
  const Guarded sums(kHidden * 2);
  const Guarded want(kHidden * 2);
  const std::byte* row = memory + kRow * kHidden * 2;
  cpu::best_row_kernels().sum_rows(DType::kBFloat16,
                                   &row,
                                   nullptr,
                                   1,
                                   kHidden,
                                   want.data(),
                                   cpu::StoreMode::kCached,
                                   nullptr,
                                   0);
  kernels::CombineParams combine;
  combine.buffer = world.buffer;
  combine.tables = world.tables;
  combine.hidden = kHidden;
  combine.num_tokens = 1;
  combine.num_topk = combine.num_slots = 1;
  combine.slots = &slot;
  combine.sums = sums.data();
  device::Launch launch = draw_launch();
  launch.shared_bytes = kernels::combine_shared_bytes(combine, launch.num_threads);
  kernels::launch_combine(launch, combine);
  if (!sums.equals(want))
    fail("combine of a row beyond 2^31 bytes differs");

  for (const int64_t run : {6, 5000}) {
    // Three runs far apart, put back to back.
    const int64_t sizes[] = {3, run};
    const int64_t strides[] = {(int64_t{3} << 30) + 2, 1};
    const Guarded target(3 * run);
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t byte = 0; byte < run; ++byte)
        if (i * strides[0] + byte < kBytes)
          memory[i * strides[0] + byte] = static_cast<std::byte>(i * 31 + byte);
    const int64_t target_strides[] = {run, 1};
    const kernels::StridedCopy copy{memory,
                                    target.data(),
                                    layout::make_strided(sizes, strides, 2, 1),
                                    layout::make_strided(sizes, target_strides, 2, 1)};
    const int64_t first_piece[] = {0, 1};
    kernels::StridedCopiesParams params;
    params.copies = &copy;
    params.first_piece = first_piece;
    params.num_copies = 1;
    params.piece_bytes = 1 << 16;
    launch.shared_bytes = kernels::strided_copies_shared_bytes(params, launch.num_threads);
    kernels::launch_strided_copies(launch, params);
    for (int64_t i = 0; i < 3 * run; ++i)
      if (target.data()[i] != static_cast<std::byte>(i / run * 31 + i % run))
        fail(concat("copy of runs of ", run, " beyond 2^31 bytes differs at ", i));
  }
  munmap(mapped, static_cast<size_t>(kBytes));
}

}  // namespace

int main(int num_arguments, char** arguments) {
  if (num_arguments > 1)
    g_fault = arguments[1];
  try {
    check_combines();
    check_combine_that_may_not_move();
    for (const bool is_by_rank : {false, true})
      for (const int bytes : {4, 8})
        check_pulled_weights(is_by_rank, bytes);
    check_weighted_gradients();
    for (int repeat = 0; repeat < 300; ++repeat)
      check_strided_copies();
    check_large_offsets();
  } catch (const std::exception& error) {
    fail(error.what());
  }
  std::puts("ok");
  return 0;
}
