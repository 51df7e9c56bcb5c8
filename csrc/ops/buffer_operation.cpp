#include "ops/buffer_operation.h"

#include "core/sync.h"

namespace moe::ops {

void check_rails(const group::Group& group, layout::Operation operation) {
  const NodeLayout& nodes = group.nodes();
  if (nodes.num_nodes() == 1)
    return;
  for (int rank_idx = 0; rank_idx < group.num_ranks(); ++rank_idx) {
    if (group.is_active(rank_idx))
      continue;
    for (int i = 0; i < nodes.num_local_ranks; ++i) {
      const int neighbor = nodes.rank_of(nodes.node_idx(rank_idx), i);
      MOE_CHECK(!group.is_active(neighbor),
                layout::operation_name(operation),
                ": rank ",
                rank_idx,
                " has failed, through which rows came to rank ",
                neighbor,
                " of its node; shrink the communicator to go on");
    }
  }
}

BufferOperation::BufferOperation(BufferBase& buffer,
                                 layout::Operation operation,
                                 const group::InterruptCheck& interrupt_check)
    : group_(buffer.group()),
      operation_(operation),
      interrupt_check_(interrupt_check),
      buffer_(buffer) {
  MOE_CHECK(!buffer.is_destroyed(),
            layout::operation_name(operation),
            ": this ",
            buffer.noun(),
            " has been destroyed");
  check_rails(group_, operation);
  group_.check_usable(operation);
}

BufferOperation::BufferOperation(BufferBase& buffer,
                                 RemainingOperation left,
                                 const group::InterruptCheck& interrupt_check)
    : group_(buffer.group()),
      operation_(left.operation),
      interrupt_check_(interrupt_check),
      epoch_(left.epoch),
      step_(left.step),
      offered_(std::move(left.offered)),
      buffer_(buffer),
      is_epoch_known_(left.is_epoch_known),
      phase_(left.step == layout::Phase::kRows ? "rows" : "done") {
  if (buffer_.tracer().is_enabled())
    phase_start_ns_ = sync::now_ns();
  group_.show_presence(buffer_.buffer_number(), epoch_, operation_);
}

RemainingOperation BufferOperation::leave() {
  RemainingOperation left{operation_, epoch_, is_epoch_known_, step_, std::move(offered_)};
  enter(nullptr);
  close();
  return left;
}

void BufferOperation::refuse_closed(int peer_rank) {
  // No rank can get the row of that one, so all end here alike; nothing was written to anybody.
  if (epoch_ != 0)
    close();
  throw InvalidArgument(concat("rank ",
                               peer_rank,
                               " has destroyed this ",
                               buffer_.noun(),
                               ", rank ",
                               group_.rank_idx(),
                               " calls ",
                               layout::operation_name(operation_),
                               " on it"));
}

void BufferOperation::reject(const layout::OperationArguments& arguments,
                             layout::RowStatus status,
                             const std::string& message) {
  RowMessage row;
  row.arguments = arguments;
  row.status = status;
  row.message = message;
  exchange_rejection(row);
  throw std::logic_error("a rejected row was not reported");
}

void BufferOperation::reject(const layout::OperationArguments& arguments,
                             const CapacityError& error) {
  RowMessage row;
  row.arguments = arguments;
  row.status = layout::RowStatus::kNoCapacity;
  row.message = error.what();
  row.needed_bytes = error.needed_bytes;
  row.available_bytes = error.available_bytes;
  exchange_rejection(row);
  throw std::logic_error("a rejected row was not reported");
}

void BufferOperation::begin(bool is_epoch_known) {
  is_epoch_known_ = is_epoch_known;
  if (buffer_.tracer().is_enabled())
    phase_start_ns_ = sync::now_ns();
  epoch_ = buffer_.take_epoch();
  if (!buffer_.is_on_progress_thread())
    group_.mail().entries()->add_caller();
  group_.mail().entries()->enter(buffer_.buffer_number(), epoch_);
  group_.show_presence(buffer_.buffer_number(), epoch_, operation_);
}

void BufferOperation::learn_epoch(uint64_t epoch) {
  epoch_ = epoch;
  is_epoch_known_ = true;
  buffer_.set_next_epoch(epoch + 1);
  group_.mail().entries()->enter(buffer_.buffer_number(), epoch_);
  group_.show_presence(buffer_.buffer_number(), epoch_, operation_);
  flush_early_records();
}

void BufferOperation::flush_early_records() {
  for (group::TraceRecord& record : early_records_) {
    record.epoch = static_cast<int64_t>(epoch_);
    buffer_.tracer().add(std::move(record));
  }
  early_records_.clear();
}

void BufferOperation::close() {
  flush_early_records();
  is_open_ = false;
  group_.leave_presence();
}

void BufferOperation::consume() {
  buffer_.complete_epoch(epoch_);
  close();
}

void BufferOperation::complete() {
  if (!is_open_)
    return;
  enter(nullptr);
  consume();
}

void BufferOperation::give_up(const std::string& reason) {
  close();
  if (!group_.is_aborted())
    group_.abort(layout::AbortCause::kPeerFailed,
                 site(step_),
                 {group_.rank_idx()},
                 concat("rank ",
                        group_.rank_idx(),
                        " gave up ",
                        layout::operation_name(operation_),
                        ", epoch ",
                        epoch_,
                        ": ",
                        reason));
  else
    group_.spread_abort();
}

void BufferOperation::quarantine_offers() {
  for (auto& window : offered_)
    group_.retired().quarantine(std::move(window));
}

group::WaitSite BufferOperation::site(layout::Phase phase) const {
  return group::WaitSite{
      operation_, phase, static_cast<int64_t>(epoch_), buffer_.buffer_number(), &interrupt_check_};
}

void BufferOperation::enter(const char* phase) {
  if (!buffer_.tracer().is_enabled())
    return;
  const int64_t now_ns = sync::now_ns();
  record(phase_start_ns_, now_ns, -1);
  phase_ = phase;
  phase_start_ns_ = now_ns;
}

void BufferOperation::record(int64_t start_ns, int64_t end_ns, int peer_rank) {
  if (phase_ == nullptr || end_ns <= start_ns)
    return;
  group::TraceRecord made{
      static_cast<int64_t>(epoch_), operation_, phase_, start_ns, end_ns, peer_rank};
  if (is_epoch_known_)
    buffer_.tracer().add(std::move(made));
  else
    early_records_.push_back(std::move(made));
}

}  // namespace moe::ops
