#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/device.h"

namespace moe::runtime {

/// Memory that captured operations of one buffer share. It is the buffer's until that ends, as
/// graphs have its addresses; what one operation has given back goes to the next that asks for as
/// much. Replays run in one order, that of the buffer's stream, in which the later operation writes
/// behind everything that the earlier one and its caller have recorded there.
class CapturedMemory {
 public:
  explicit CapturedMemory(std::shared_ptr<Stream> stream)
      : store_(std::make_shared<Store>(std::move(stream))) {}
  ~CapturedMemory() { close(); }
  CapturedMemory(const CapturedMemory&) = delete;
  CapturedMemory& operator=(const CapturedMemory&) = delete;

  /// @param kind  Whatever of one kind and size was left by an operation makes sense to the next.
  /// @param make  () -> std::shared_ptr<T>, where nothing was given back.
  /// @return Memory that is given back, on any thread, when nobody holds it.
  template <typename T, typename Make>
  std::shared_ptr<T> take(int64_t kind, int64_t bytes, const Make& make) {
    const Key key{kind, bytes};
    std::shared_ptr<void> owned = store_->find(key);
    if (owned == nullptr)
      owned = make();
    T* const place = static_cast<T*>(owned.get());
    return {place, [store = store_, key, owned = std::move(owned)](T*) mutable {
              store->give_back(key, std::move(owned));
            }};
  }

  /// Puts records from now on behind all that may use what was taken since the last time.
  /// @throws InvalidArgument  it does not, as far as the device can tell: a stream of the graph had
  ///   work that may read it when it was given back, and the buffer's stream does not wait for
  ///   that.
  void check_order();

  /// Gives back what nobody holds, and the rest as soon as nobody does.
  void close();

 private:
  using Key = std::pair<int64_t, int64_t>;
  struct Free {
    std::shared_ptr<void> memory;
    std::shared_ptr<const CapturePoint> since;  ///< null outside of captures
  };
  struct Store {
    explicit Store(std::shared_ptr<Stream> used) : stream(std::move(used)) {}
    std::shared_ptr<void> find(const Key& key);
    void give_back(const Key& key, std::shared_ptr<void> memory) noexcept;

    const std::shared_ptr<Stream> stream;
    std::mutex mutex;
    bool is_closed = false;
    std::map<Key, std::vector<Free>> free;
    std::vector<std::shared_ptr<const CapturePoint>> to_check;
  };

  std::shared_ptr<Store> store_;
};

}  // namespace moe::runtime
