#include "runtime/stream_marks.h"

#include <algorithm>
#include <utility>

namespace moe::runtime {

namespace {

/// In two steps: asking throws where a stream has failed.
void forget_complete(std::vector<std::shared_ptr<Event>>* events) {
  for (auto& event : *events)
    if (event != nullptr && event->is_complete())
      event = nullptr;
  std::erase(*events, nullptr);
}

}  // namespace

void StreamMarks::watch(const std::shared_ptr<Stream>& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::erase_if(streams_, [](const auto& weak) { return weak.expired(); });
  streams_.push_back(stream);
}

void StreamMarks::unwatch(Stream& stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_complete(&last_events_);
  if (!stream.is_capturing() && !stream.is_idle())
    last_events_.push_back(stream.record());
}

std::shared_ptr<StreamMarks::Mark> StreamMarks::mark() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (open_ == nullptr)
    open_ = std::make_shared<Mark>();
  return open_;
}

bool StreamMarks::has_passed(Mark& mark) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mark.is_open_ && !close(mark))
    return false;
  forget_complete(&mark.events_);
  return mark.events_.empty();
}

bool StreamMarks::are_idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  forget_complete(&last_events_);
  return last_events_.empty() &&
         std::all_of(streams_.begin(), streams_.end(), [](const auto& weak) {
           const auto stream = weak.lock();
           return stream == nullptr || stream->is_idle();
         });
}

/// @return false while a stream is captured.
bool StreamMarks::close(Mark& mark) {
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& weak : streams_)
    if (auto stream = weak.lock())
      streams.push_back(std::move(stream));
  for (const auto& stream : streams)
    if (stream->is_capturing())
      return false;
  forget_complete(&last_events_);
  std::vector<std::shared_ptr<Event>> events = last_events_;
  for (const auto& stream : streams)
    if (!stream->is_idle())
      events.push_back(stream->record());
  mark.events_ = std::move(events);
  mark.is_open_ = false;
  open_ = nullptr;
  return true;
}

}  // namespace moe::runtime
