#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cuda_stand_in_state.h"
#include "device/kernel_modules.h"

namespace moe::stand_in {

using Clock = std::chrono::steady_clock;

State& state() {
  static auto* const instance = new State;  // streams may run during exit
  return *instance;
}

thread_local ThreadState this_thread;

static void violate(const std::string& text) {
  const std::lock_guard lock(state().mutex);
  state().violations.push_back(text);
}

cudaError_t fail(cudaError_t code, const char* call, const std::string& why) {
  violate(concat(call, ": ", why));
  return this_thread.last_error = code;
}

CUresult refuse(CUresult code, const char* call, const std::string& why) {
  violate(concat(call, ": ", why));
  return code;
}

/// RT, Initialization: what may be answered to a program that looks for devices.
cudaError_t answer(cudaError_t code) {
  return this_thread.last_error = code;
}

void begin(const char* call) {
  std::call_once(state().once, [] {
    // PG, Environment Variables: CUDA_VISIBLE_DEVICES lists what a process sees, in its order.
    const char* const mask = std::getenv("CUDA_VISIBLE_DEVICES");
    if (mask == nullptr) {
      for (int i = 0; i < state().machine.num_devices; ++i)
        state().visible.push_back(i);
    } else {
      for (const char* at = mask; *at != '\0'; ++at)
        if (*at >= '0' && *at - '0' < state().machine.num_devices)
          state().visible.push_back(*at - '0');
    }
    state().contexts = std::vector<Context>(state().visible.size());
    if (state().machine.driver_version == 0)
      state().machine.driver_version = CUDART_VERSION;
  });
  ++this_thread.calls[call];
}

int num_visible() {
  return static_cast<int>(state().visible.size());
}

bool is_device(int device_idx) {
  return device_idx >= 0 && device_idx < num_visible();
}

/// RT, Initialization: the first call that needs the primary context of the current device makes
/// it, and makes it current.
Context& use_context() {
  Context& context = state().contexts[static_cast<size_t>(this_thread.device_idx)];
  const std::lock_guard lock(state().mutex);
  context.is_active = true;
  this_thread.has_context = true;
  return context;
}

/// RT, Stream Management, cudaThreadExchangeStreamCaptureMode: whom captures keep from calls that
/// they cannot record.
bool is_prohibited() {
  if (this_thread.mode == cudaStreamCaptureModeRelaxed)
    return false;
  const std::lock_guard lock(state().mutex);
  return std::any_of(
      state().captures.begin(), state().captures.end(), [](const OpenCapture& capture) {
        if (capture.thread == std::this_thread::get_id())
          return capture.mode != cudaStreamCaptureModeRelaxed;
        return this_thread.mode == cudaStreamCaptureModeGlobal &&
               capture.mode == cudaStreamCaptureModeGlobal;
      });
}

const char* const kOwnModule = "kernels of the package";
char own_functions[kNumOwnFunctions];

void own_kernel() {}
static const device::KernelModule own_module(reinterpret_cast<const void*>(&own_kernel));

static std::vector<std::shared_ptr<CUstream_st>> all_streams(const Context& context) {
  const std::lock_guard lock(state().mutex);
  std::vector<std::shared_ptr<CUstream_st>> streams = context.streams;
  streams.insert(streams.end(), context.ended.begin(), context.ended.end());
  if (context.legacy != nullptr)
    streams.push_back(context.legacy);
  return streams;
}

static std::string what_runs(CUstream_st& stream) {
  const std::lock_guard lock(stream.names_mutex);
  for (const auto& [number, name] : stream.names)
    if (!stream.worker->progress()->has_ended(number))
      return name;
  return "";
}

static void dawdle_on(int device_idx) {
  const auto until = Clock::now() + std::chrono::milliseconds(state().dawdle_ms);
  while (device_idx == state().dawdle_device && state().dawdle_ms > 0 && Clock::now() < until) {
    if (has_kernel())
      state().dawdle_ms = 0;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

/// Waits until all that the streams of the context were given by now has ended.
static void await_idle(Context& context, const char* call) {
  const std::lock_guard waiting(context.waiting);
  std::vector<std::pair<std::shared_ptr<CUstream_st>, uint64_t>> ends;
  for (const auto& stream : all_streams(context))
    ends.emplace_back(stream, stream->worker->progress()->num_added());
  const auto deadline = Clock::now() + state().machine.patience;
  for (const auto& [stream, number] : ends)
    while (!stream->worker->progress()->has_ended(number)) {
      if (Clock::now() > deadline) {
        std::printf("deadlock: %s waits for %s\n", call, what_runs(*stream).c_str());
        std::fflush(stdout);
        std::_Exit(3);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

static void count_wait(const char* call) {
  const std::lock_guard lock(state().mutex);
  ++state().waits[call];
}

void drain(Context& context, const char* call) {
  count_wait(call);
  dawdle_on(static_cast<int>(&context - state().contexts.data()));
  await_idle(context, call);
}

void drain_all(const char* call, int device_idx) {
  count_wait(call);
  dawdle_on(device_idx);
  for (Context& context : state().contexts)
    if (context.is_active)
      await_idle(context, call);
}

/// A call that may wait for the device and that no capture records. @return its error.
cudaError_t wait_for_device(const char* call) {
  Context& context = use_context();
  if (is_prohibited())
    return fail(cudaErrorStreamCaptureUnsupported, call, "while a stream is captured");
  drain(context, call);
  return cudaSuccess;
}

std::shared_ptr<CUstream_st> find_stream(cudaStream_t handle) {
  if (handle == cudaStreamPerThread)
    return nullptr;  // nobody here uses it
  if (handle == nullptr || handle == cudaStreamLegacy) {
    Context& context = use_context();
    const std::lock_guard lock(state().mutex);
    if (context.legacy == nullptr)
      context.legacy = std::make_shared<CUstream_st>(this_thread.device_idx, true);
    return context.legacy;
  }
  const std::lock_guard lock(state().mutex);
  for (const Context& context : state().contexts)
    for (const auto& stream : context.streams)
      if (stream.get() == handle)
        return stream;
  return nullptr;
}

bool is_legacy(const CUstream_st& stream) {
  const std::lock_guard lock(state().mutex);
  return state().contexts[static_cast<size_t>(stream.device_idx)].legacy.get() == &stream;
}

/// RT, Stream synchronization behavior, Default stream: the legacy stream waits for all blocking
/// streams of its context, and they wait for it.
static void join_default(const std::shared_ptr<CUstream_st>& stream) {
  if (!stream->is_blocking || stream->worker->is_capturing())
    return;
  Context& context = state().contexts[static_cast<size_t>(stream->device_idx)];
  if (!is_legacy(*stream)) {
    if (context.legacy != nullptr)
      stream->worker->wait(*context.legacy->worker->record());
    return;
  }
  for (const auto& other : all_streams(context))
    if (other != stream && other->is_blocking)
      stream->worker->wait(*other->worker->record());
}

/// RT, Stream Management, cudaStreamIsCapturing: the legacy stream may not be looked at while a
/// blocking stream of its context is captured.
bool has_implicit_capture(const CUstream_st& stream) {
  if (!is_legacy(stream))
    return false;
  for (const auto& other : all_streams(state().contexts[static_cast<size_t>(stream.device_idx)]))
    if (other->is_blocking && other->worker->is_capturing())
      return true;
  return false;
}

/// @return null after a wrong call.
std::shared_ptr<CUstream_st> stream_for_work(cudaStream_t handle, const char* call) {
  auto stream = find_stream(handle);
  if (stream == nullptr) {
    fail(cudaErrorInvalidResourceHandle, call, "the stream is none");
    return nullptr;
  }
  if (has_implicit_capture(*stream)) {
    fail(cudaErrorStreamCaptureImplicit, call, "a capture would depend on the default stream");
    return nullptr;
  }
  join_default(stream);
  return stream;
}

Place place_of(const void* address, size_t bytes) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(state().mutex);
  auto entry = state().memory.upper_bound(start);
  if (entry == state().memory.begin())
    return Place::kPageable;
  --entry;
  if (start >= entry->first + entry->second.bytes)
    return Place::kPageable;
  // What is mapped behind each other is one to whom it is open.
  for (auto part = entry; start + bytes > part->first + part->second.bytes;) {
    const uintptr_t end = part->first + part->second.bytes;
    if (++part == state().memory.end() || part->first != end ||
        part->second.devices != entry->second.devices || part->second.kind != Memory::kDevice)
      return Place::kNowhere;
  }
  return entry->second.kind == Memory::kDevice ? Place::kDevice : Place::kHost;
}

bool is_of_peer(const void* address) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(state().mutex);
  auto entry = state().memory.upper_bound(start);
  return entry != state().memory.begin() && (--entry)->second.is_of_peer &&
         start < entry->first + entry->second.bytes;
}

/// PG, Lazy Loading, Concurrent Execution: loading a kernel may need the context to be idle, so a
/// first launch may wait for kernels that wait for it.
void load(const CUstream_st& stream, const void* module, const std::string& name) {
  Context& context = state().contexts[static_cast<size_t>(stream.device_idx)];
  {
    const std::lock_guard lock(state().mutex);
    if (context.loaded.contains(module))
      return;
  }
  drain(context, concat("the first launch of ", name).c_str());
  const std::lock_guard lock(state().mutex);
  context.loaded.insert(module);
}

bool is_refused(const char* call) {
  return state().machine.refused == call;
}

static bool has_own_kernels(const Context& context) {
  return state().machine.is_eager ||
         std::all_of(std::begin(own_functions), std::end(own_functions), [&](const char& function) {
           return context.loaded.contains(&function);
         });
}

/// RT, Execution Control, cudaFuncSetAttribute: without it a block has 48 KiB of shared memory.
/// Which of the functions a kernel is, nobody here knows: so all must be allowed as much.
static bool is_allowed(const Context& context, size_t shared_bytes) {
  constexpr size_t kBytesWithoutAsking = 48 * 1024;
  return shared_bytes + kStaticSharedBytes <= kBytesWithoutAsking ||
         std::all_of(std::begin(own_functions), std::end(own_functions), [&](const char& function) {
           const auto entry = context.shared_bytes.find(&function);
           return entry != context.shared_bytes.end() &&
                  shared_bytes <= static_cast<size_t>(entry->second);
         });
}

void put_kernel(CUstream_st& stream, simt::Kernel kernel) {
  const std::string name = kernel.name;
  const bool is_captured = stream.worker->is_capturing();
  stream.worker->launch(std::move(kernel));
  if (is_captured)
    return;
  const std::lock_guard lock(stream.names_mutex);
  stream.names[stream.worker->progress()->num_added()] = name;
  std::erase_if(stream.names, [&](const auto& entry) {
    return stream.worker->progress()->has_ended(entry.first);
  });
}

Machine& machine() {
  return state().machine;
}

std::vector<std::string> take_violations() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().violations, {});
}

std::map<std::string, int> take_calls() {
  return std::exchange(this_thread.calls, {});
}

std::map<std::string, int> take_waits() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().waits, {});
}

void dawdle(std::chrono::milliseconds limit, int device_idx) {
  state().dawdle_device = device_idx;
  state().dawdle_ms = limit.count();
}

bool has_kernel() {
  for (const Context& context : state().contexts)
    for (const auto& stream : all_streams(context))
      if (!what_runs(*stream).empty())
        return true;
  return false;
}

bool has_default_stream(int device_idx) {
  const std::lock_guard lock(state().mutex);
  return state().contexts[static_cast<size_t>(device_idx)].legacy != nullptr;
}

int num_launches() {
  return state().num_launches;
}

void unload_kernels() {
  const std::lock_guard lock(state().mutex);
  state().contexts[static_cast<size_t>(this_thread.device_idx)].loaded.clear();
}

bool can_access(const void* address, int device_idx) {
  const auto start = reinterpret_cast<uintptr_t>(address);
  const std::lock_guard lock(state().mutex);
  auto entry = state().memory.upper_bound(start);
  if (entry == state().memory.begin())
    return false;
  --entry;
  const Memory& memory = entry->second;
  const auto reaches = [&](int owner_idx) {
    return owner_idx == device_idx ||
           (!memory.is_of_peer && state().peers.contains({device_idx, owner_idx}));
  };
  return start < entry->first + memory.bytes &&
         (memory.kind != Memory::kDevice ||
          std::any_of(memory.devices.begin(), memory.devices.end(), reaches));
}

const void* make_foreign_kernel(const std::string& name, std::function<void()> body) {
  auto* const symbol = new char;
  state().foreign[symbol] = Foreign{name, std::move(body)};
  return symbol;
}

}  // namespace moe::stand_in

using namespace moe::stand_in;

/// PG, Multi-Device System, Stream and Event Behavior: a launch into a stream of another device
/// than the current one fails.
void CUstream_st::launch(moe::simt::Kernel kernel) {
  begin("cudaLaunchKernelExC");
  const std::string name = kernel.name;
  const auto stream = stream_for_work(this, "cudaLaunchKernelExC");
  if (stream == nullptr || device_idx != this_thread.device_idx) {
    fail(cudaErrorInvalidResourceHandle,
         "cudaLaunchKernelExC",
         moe::concat(name,
                     " for device ",
                     device_idx,
                     " where device ",
                     this_thread.device_idx,
                     " is current"));
    return;
  }
  use_context();
  Context& context = state().contexts[static_cast<size_t>(device_idx)];
  bool is_loaded = false;
  bool has_shared_memory = false;
  {
    const std::lock_guard lock(state().mutex);
    is_loaded = has_own_kernels(context);
    has_shared_memory = is_allowed(context, kernel.shape.shared_bytes);
  }
  if (!has_shared_memory) {
    fail(cudaErrorInvalidValue,
         "cudaLaunchKernelExC",
         moe::concat(name, " with ", kernel.shape.shared_bytes, " bytes of shared memory"));
    return;
  }
  if (!is_loaded)
    load(*this, kOwnModule, name);
  if (!worker->is_capturing())
    ++state().num_launches;
  put_kernel(*this, std::move(kernel));
}
