#pragma once

#include <exception>
#include <memory>
#include <mutex>

#include "ops/dispatch.h"
#include "runtime/device_exchange.h"

namespace moe::runtime {

/// What all ranks say of an operation that was handed out before the host had heard it.
///
/// Its kernels were launched, and move nothing where some rank found something wrong or rows
/// disagree. The host hears so when somebody asks, or before the next operation of the buffer,
/// which is refused on every rank where somebody had not been told; see
/// DeviceExchange::tell_late_error(). Thread-safe.
class LateVerdict final : public host::CallerJoin {
 public:
  static std::shared_ptr<LateVerdict> make(DeviceEndpoint& endpoint, LeftRows left);

  /// Blocks the host until it knows.
  void join(const host::InterruptCheck& interrupt_check) override;
  bool is_complete() override;

  /// The same before the next operation, and for a buffer that ends: on a thread whose device is
  /// this one.
  /// @return what was found wrong where nobody has been told, else null.
  std::exception_ptr settle(const host::InterruptCheck& interrupt_check);

  /// Hears the operation of another buffer that the caller's stream of @p endpoint is behind. Else
  /// the host could wait in one operation for a peer that waits in the other, and nobody would see
  /// that they wait for each other.
  static void hear_before(const DeviceEndpoint& endpoint,
                          const host::InterruptCheck& interrupt_check);

  /// In place of a host that waits: ends it where a peer takes no part, as it has destroyed its
  /// buffer; warns of one that does not come. Does not wait for anybody.
  void look(int64_t now_ns);

 private:
  LateVerdict(DeviceEndpoint& endpoint, LeftRows left);
  void judge(const host::InterruptCheck& interrupt_check);
  bool has_ticket() const;

  DeviceEndpoint& endpoint_;  ///< it has settled this before its end
  const int64_t start_ns_;
  std::mutex mutex_;
  LeftRows left_;
  RowArrivals arrivals_;
  bool is_judged_ = false;
  bool is_told_ = false;
  std::exception_ptr error_;
};

}  // namespace moe::runtime
