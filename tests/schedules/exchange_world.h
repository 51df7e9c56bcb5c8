#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/exchange.h"
#include "layout/routing.h"
#include "schedules/exchange_case.h"
#include "schedules/run.h"

namespace moe::simt::checker {

/// The shape of a world of ranks that exchange rows.
struct ExchangeWorldShape {
  int num_ranks = 2;
  int depth = 2;
  uint64_t first_epoch = 1;
  std::vector<int32_t> expert_rank;
  std::vector<uint8_t> is_active;  ///< [num_ranks]
  uint64_t stall_limit_ns = 1'000'000'000;
  uint64_t arrival_limit_ns = 1'000'000'000;
};

/// Memory of one rank's buffer.
struct ExchangeRank {
  kernels::Buffer buffer;
  std::unique_ptr<RankStream> stream;
  uint64_t* segment_bases = nullptr;
  uint64_t** mails = nullptr;  ///< device [num_ranks]: where every rank is written to
};

/// Memory of one operation on one rank.
struct ExchangeMemory {
  kernels::ExchangeParams params;
  kernels::OffersParams offers;
  kernels::HostRead* host_read = nullptr;
  kernels::HostRead* second_host_read = nullptr;
  uint64_t epoch = 0;
  uint64_t* num_wrong = nullptr;  ///< device: words of peers that were not what they should be
};

/// Ranks that exchange rows, and kernels that stand for those that move rows: they write a word to
/// every rank that rows go to, or pull one, and end as such kernels end.
class ExchangeWorld {
 public:
  static constexpr int kNumSegments = 3;
  static constexpr int64_t kSegmentBytes = 1 << 20;
  static constexpr int kNumBlocks = 2;  ///< of a kernel that moves rows

  ExchangeWorld(Run& run, ExchangeWorldShape shape);

  const layout::Placement& placement() const { return placement_; }
  const ExchangeWorldShape& shape() const { return shape_; }
  ExchangeRank& rank(int rank_idx) { return ranks_[static_cast<size_t>(rank_idx)]; }
  bool is_active(int rank_idx) const {
    return shape_.is_active[static_cast<size_t>(rank_idx)] != 0;
  }

  /// Peers learn of a rank's segments some time later.
  void announce_segments();

  ExchangeMemory prepare(const ExchangeCase& expected, int rank_idx, uint64_t epoch);

  /// Does what the host of a rank does before it launches kernels for second offers
  /// (Phase::kOffers) or rows (kData).
  using Pause = std::function<void(int rank_idx, layout::Phase phase)>;
  void set_pause(Pause pause) { pause_ = std::move(pause); }

  /// The host of one rank: puts an operation into its stream. Called on a fiber.
  /// @param num_threads  of the exchange
  void launch(const ExchangeCase& expected, int rank_idx, ExchangeMemory& memory, int num_threads);

  /// Compares what an operation left with what the spec says; after everything has ended.
  void check(const ExchangeCase& expected, int rank_idx, const ExchangeMemory& memory);

  template <typename T>
  T* allocate(int64_t count, Ownership ownership, int rank_idx, const std::string& name) {
    return reinterpret_cast<T*>(run_.guest().allocate(
        count > 0 ? count * static_cast<int64_t>(sizeof(T)) : 1, ownership, rank_idx, name, true));
  }
  template <typename T>
  T* allocate_undefined(int64_t count, Ownership ownership, int rank_idx, const std::string& name) {
    return reinterpret_cast<T*>(run_.guest().allocate(
        count > 0 ? count * static_cast<int64_t>(sizeof(T)) : 1, ownership, rank_idx, name, false));
  }
  template <typename T>
  T* copy_of(const std::vector<T>& values, int rank_idx, const std::string& name) {
    T* const place =
        allocate<T>(static_cast<int64_t>(values.size()), Ownership::kDevice, rank_idx, name);
    if (!values.empty())
      std::memcpy(run_.guest().real(place), values.data(), values.size() * sizeof(T));
    return place;
  }
  template <typename T>
  T& real(T* address) {
    return *reinterpret_cast<T*>(run_.guest().real(address));
  }

 private:
  template <typename T>
  void make(T*& place, int rank_idx, int64_t count, const char* name) {
    place = allocate_undefined<T>(count, Ownership::kDevice, rank_idx, name);
  }
  kernels::Tables make_tables(int rank_idx);
  kernels::Choices make_choices(const ExchangeCase& expected, int rank_idx);
  void make_host_reads(const ExchangeCase& expected,
                       int rank_idx,
                       const Offer& second_offer,
                       ExchangeMemory* memory);
  template <typename T>
  void expect(const std::string& what, int rank_idx, uint64_t epoch, T expected, T found);
  void check_tables(const ExchangeCase& expected, int rank_idx, const ExchangeMemory& memory);
  void check_peers(const ExchangeCase& expected, int rank_idx, const ExchangeMemory& memory);
  void check_slots(const ExchangeCase& expected, int rank_idx, const ExchangeMemory& memory);
  void await_host_read(int rank_idx,
                       kernels::HostRead* host_read,
                       uint64_t ticket,
                       uint64_t epoch,
                       kernels::OperationStatus status);
  void check_host_rows(const ExchangeCase& expected, int rank_idx, const ExchangeMemory& memory);
  std::byte* address(int rank_idx, const Offer& offer);
  /// First and second offers in an epoch, by rank.
  std::vector<std::pair<Offer, Offer>>& offers_of(uint64_t epoch) {
    auto& offers = offers_[epoch];
    offers.resize(static_cast<size_t>(shape_.num_ranks));
    return offers;
  }

  Run& run_;
  Pause pause_ = [](int, layout::Phase) {};
  ExchangeWorldShape shape_;
  layout::Placement placement_;
  std::deque<ExchangeRank> ranks_;
  std::map<uint64_t, std::vector<std::pair<Offer, Offer>>> offers_;
};

}  // namespace moe::simt::checker
