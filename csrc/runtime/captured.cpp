#include "runtime/captured.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/rank_list.h"
#include "ops/buffer_operation.h"
#include "ops/combine_rules.h"
#include "ops/dispatch_rules.h"
#include "runtime/combine_launches.h"
#include "runtime/dispatch_launches.h"
#include "runtime/receive_phase.h"

namespace moe::runtime {

namespace {

using layout::RowLayout;

/// Common part of every captured operation.
class Capture {
 public:
  Capture(DeviceEndpoint& endpoint, layout::Operation operation) : endpoint_(endpoint) {
    MOE_CHECK(!endpoint.is_destroyed(),
              layout::operation_name(operation),
              ": this buffer has been destroyed");
    MOE_CHECK(!endpoint.is_on_progress_thread(),
              layout::operation_name(operation),
              ": async_op has no meaning in a capture, the graph says when it runs");
    ops::check_rails(endpoint.group(), operation);
    endpoint.group().check_usable(operation);
    endpoint.open_receive().settle({});
    if (const std::exception_ptr error = endpoint.operations().take_all({}))
      std::rethrow_exception(error);
    endpoint.order().enter_capture();
    const auto memory = allocate(2 * static_cast<int64_t>(sizeof(int32_t)));
    status_ = std::shared_ptr<int32_t>(memory, reinterpret_cast<int32_t*>(memory.get()));
  }

  /// Device memory of the operation: its status, and rows that it dropped here.
  const std::shared_ptr<int32_t>& status() const { return status_; }

  /// Keeps it as long as this operation lasts, at least.
  template <typename T>
  std::shared_ptr<T> hold(std::shared_ptr<T> owned) {
    held_.push_back(owned);
    return owned;
  }
  /// Device memory that this operation writes before it reads it.
  std::shared_ptr<std::byte> allocate(int64_t bytes, CapturedKind kind = kCapturedScratch) {
    return hold(endpoint_.buffer_memory().take_captured(kind, bytes));
  }
  /// @param layout  Layout of the dispatch whose rows go there, or of that whose rows a combine
  ///   brings back.
  std::shared_ptr<Window> allocate_window(int64_t bytes, RowLayout layout) {
    const auto size = static_cast<uint64_t>(bytes);
    return hold(layout == RowLayout::kLowLatency
                    ? endpoint_.take_window(size, true)
                    : endpoint_.buffer_memory().take_captured_window(kCapturedRows, size));
  }
  /// Before the first kernel; see CapturedMemory.
  void check_order() { endpoint_.buffer_memory().captured().check_order(); }

  void exchange(kernels::ExchangeParams row, const ops::PlanHeader* plan) {
    row.buffer = endpoint_.control().buffer();
    row.tables.status = status_.get();
    if (plan != nullptr)
      row.needed_status = static_cast<const DevicePlan*>(plan)->status.get();
    endpoint_.launcher().exchange(row);
  }

 private:
  DeviceEndpoint& endpoint_;
  std::shared_ptr<int32_t> status_;
  std::vector<std::shared_ptr<const void>> held_;
};

void check_was_made(const ops::PlanHeader& plan) {
  const std::string failure = find_failure(plan);
  MOE_CHECK(failure.empty(), failure);
}

void check_fixed(const ops::DispatchParams& params) {
  if (params.plan || params.layout == RowLayout::kLowLatency)
    return;
  MOE_CHECK(params.fixed_rows >= 0 && params.capacity().on_overflow != layout::OnOverflow::kGrow,
            "a dispatch in a capture has a result of fixed size: it takes Layout.LOW_LATENCY or a "
            "Capacity with num_rows and on_overflow \"drop\" or \"raise\", got num_rows = ",
            params.fixed_rows,
            " (-1 for none) and on_overflow \"",
            layout::kOnOverflowNames[static_cast<int>(params.capacity().on_overflow)],
            "\"");
}

/// Words of a rank on gradients in a capture, which the host does not hear from the others: it
/// needs all that it can have, as every rank that captures alike does.
int32_t all_gradients(const layout::OperationArguments& arguments) {
  if (!layout::GradientWord::is_enabled(arguments.gradients))
    return arguments.gradients;
  return arguments.gradients | arguments.all_needs();
}

/// A plan of no capture would go when its handle does.
void keep_eager(DeviceEndpoint& endpoint, const std::shared_ptr<const ops::PlanHeader>& plan) {
  if (static_cast<const DevicePlan&>(*plan).status == nullptr)
    endpoint.buffer_memory().keep(plan);
}

/// The handle's plan, or one that the graph writes.
std::shared_ptr<const ops::PlanHeader> capture_plan(Capture& capture,
                                                    DeviceEndpoint& endpoint,
                                                    const ops::DispatchParams& params,
                                                    DispatchLaunches& launches) {
  if (params.plan) {
    check_was_made(*params.plan);
    launches.take_plan(static_cast<const DevicePlan&>(*params.plan));
    keep_eager(endpoint, params.plan);
    return params.plan;
  }
  launches.take_sets();
  launches.make_plan([&](int64_t bytes) { return capture.allocate(bytes).get(); });
  if (params.replicas != nullptr)
    endpoint.buffer_memory().keep(params.replicas);
  launches.foresee_plan();
  launches.made_plan()->hash = endpoint.order().num_captured();  // ranks capture alike
  launches.made_plan()->status = capture.status();
  return launches.made_plan();
}

/// Device memory [num_ranks] that the graph fills with the masks of this call; null for none.
const uint8_t* capture_masks(Capture& capture,
                             DeviceEndpoint& endpoint,
                             const std::vector<int>& masked_ranks) {
  if (masked_ranks.empty())
    return nullptr;
  const std::vector<uint8_t> is_masked = rank_flags(masked_ranks, endpoint.num_ranks());
  const auto bytes = static_cast<int64_t>(is_masked.size());
  const auto staging = endpoint.device().allocate_host(bytes);
  endpoint.buffer_memory().keep(staging);
  const auto values = capture.allocate(bytes);
  std::memcpy(staging.get(), is_masked.data(), is_masked.size());
  endpoint.order().stream()->copy(values.get(), staging.get(), bytes);
  return reinterpret_cast<const uint8_t*>(values.get());
}

/// Receives the rows, at once or, of an asynchronous dispatch, where its caller waits for them.
void capture_receive(Capture& capture,
                     DeviceEndpoint& endpoint,
                     const ops::DispatchParams& params,
                     const std::shared_ptr<Window>& window,
                     int64_t bytes,
                     DispatchLaunches& launches,
                     ops::DispatchOutcome* outcome) {
  const bool is_copied_out =
      params.copy_out == ops::CopyOut::kAlways && outcome->plan->layout() != RowLayout::kLowLatency;
  const bool receives_later = params.is_async && !is_copied_out;
  if (!receives_later)
    endpoint.launcher().receive(launches.receive_params(), true);
  outcome->owner = window;
  outcome->rows = window->data();
  if (is_copied_out) {
    const auto copy = capture.allocate(bytes, kCapturedSums);
    endpoint.order().stream()->copy(copy.get(), window->data(), bytes);
    outcome->owner = copy;
    outcome->rows = copy.get();
  }
  if (receives_later) {
    outcome->end = endpoint.open_receive().open(ReceivePhase::captured(
        endpoint.order(), [&launcher = endpoint.launcher(), params = launches.receive_params()] {
          launcher.receive(params);
        }));
  } else {
    endpoint.order().leave_capture(*endpoint.order().caller());
  }
}

/// Points to counts that the host cannot know, as the graph leaves them on the device.
void point_into_tables(const DispatchTables& tables,
                       const std::shared_ptr<int32_t>& status,
                       const DeviceEndpoint& endpoint,
                       ops::DispatchOutcome* outcome) {
  outcome->expert_offsets = std::shared_ptr<void>(tables.memory, tables.tables.expert_offsets);
  outcome->num_tokens_per_expert =
      std::shared_ptr<void>(tables.memory, tables.tables.num_tokens_per_expert);
  outcome->status = status;
  outcome->waited_ns.resize(static_cast<size_t>(endpoint.num_ranks()));
}

}  // namespace

void check_has_counts(const DevicePlan& plan) {
  MOE_CHECK(plan.status == nullptr,
            "this handle was made in a capture: the host does not know its counts, and it serves "
            "captured operations only");
}

ops::DispatchOutcome capture_dispatch(DeviceEndpoint& endpoint, const ops::DispatchParams& params) {
  check_fixed(params);
  const layout::Arrangement arrangement =
      params.plan ? params.plan->arrangement
                  : ops::arrangement_of(endpoint, params.layout, params.expert_alignment);
  Capture capture(endpoint,
                  params.plan ? layout::Operation::kCachedDispatch : layout::Operation::kDispatch);
  DispatchLaunches launches(endpoint, params, arrangement, Contents::kCaptured);
  ops::DispatchOutcome outcome;
  outcome.plan = capture_plan(capture, endpoint, params, launches);
  launches.tables().tables.status = capture.status().get();

  if (const std::string problem = launches.find_shortage(); !problem.empty())
    throw InvalidArgument(problem);

  const layout::ReceiveWindow layout = ops::receive_window(
      arrangement, params, outcome.plan->num_rows(), outcome.plan->num_recv_topk);
  const auto window =
      params.window ? params.window : capture.allocate_window(layout.bytes, arrangement.layout);
  capture.check_order();
  kernels::ExchangeParams row = launches.row();
  row.offer = window->offer();
  outcome.gradients = row.arguments.gradients = all_gradients(row.arguments);
  if (const uint8_t* const is_masked = capture_masks(capture, endpoint, params.masked_ranks))
    row.is_masked = is_masked;
  capture.exchange(row, params.plan.get());
  launches.send_rows();
  capture_receive(capture, endpoint, params, window, layout.bytes, launches, &outcome);
  ops::point_into_window(params, arrangement, layout, &outcome);
  point_into_tables(launches.tables(), capture.status(), endpoint, &outcome);
  return outcome;
}

ops::CombineOutcome capture_combine(DeviceEndpoint& endpoint, const ops::CombineParams& params) {
  if (const std::string problem = find_shortage(endpoint, params); !problem.empty())
    throw InvalidArgument(problem);
  Capture capture(endpoint, layout::Operation::kCombine);
  check_was_made(*params.plan);
  keep_eager(endpoint, params.plan);
  const RowLayout layout = params.plan->layout();
  ops::CombineOutcome outcome;
  kernels::ExchangeParams row = combine_row(endpoint, params);
  outcome.gradients = row.arguments.gradients = all_gradients(row.arguments);
  std::byte* requests = nullptr;
  if (row.adds_for_peers != 0) {
    const auto window = capture.allocate_window(rank_sums_bytes(params), layout);
    capture.check_order();
    row.offer = launch_requests(endpoint, params, *window);
    requests = window->data();
  }
  // Rows that are copied are copied in each run.
  ops::offer_rows(
      params,
      requests == nullptr ? ops::combined_row_bytes(params) : 0,
      endpoint.memory(),
      [&](const std::byte* source, int64_t bytes) {
        const auto window = capture.allocate_window(bytes, layout);
        capture.check_order();
        endpoint.order().stream()->copy(window->data(), source, bytes);
        return window->offer();
      },
      &row.offer,
      &row.weights_offer);
  const ops::SumsWindow sums = ops::sums_window(params);
  const auto memory = capture.allocate(sums.bytes, kCapturedSums);
  capture.check_order();
  capture.exchange(row, params.plan.get());
  outcome.owner = memory;
  std::byte* const pulled = memory.get() + sums.weights_offset;
  ops::point_into_sums(params, memory.get(), &outcome);
  kernels::Tables tables = row.tables;
  tables.status = capture.status().get();
  launch_sums(endpoint, params, tables, requests, outcome.sums, pulled);
  endpoint.order().leave_capture(*endpoint.order().caller());
  outcome.waited_ns.resize(static_cast<size_t>(endpoint.num_ranks()));
  return outcome;
}

}  // namespace moe::runtime
