#include <algorithm>
#include <cstdio>

#include "cuda_stand_in_state.h"

// Devices, streams, events, graphs, kernels, and what else the driver is asked.

using namespace moe::stand_in;

extern "C" {

// --- Errors, devices, contexts ------------------------------------------------------------------

const char* cudaGetErrorName(cudaError_t) {
  return "an error of the stand-in";
}

const char* cudaGetErrorString(cudaError_t) {
  return "see what it was called with";
}

cudaError_t cudaGetLastError() {
  return std::exchange(this_thread.last_error, cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int* version) {
  begin("cudaDriverGetVersion");
  *version = state().machine.driver_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  begin("cudaGetDeviceCount");
  *count = num_visible();
  return *count > 0 ? cudaSuccess : answer(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device_idx) {
  begin("cudaGetDevice");
  *device_idx = this_thread.device_idx;
  return cudaSuccess;
}

/// RT, Device Management, cudaSetDevice: since CUDA 12 it makes the primary context.
cudaError_t cudaSetDevice(int device_idx) {
  begin("cudaSetDevice");
  if (!is_device(device_idx))
    return fail(cudaErrorInvalidDevice, "cudaSetDevice", moe::concat("device ", device_idx));
  this_thread.device_idx = device_idx;
  use_context();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device_idx) {
  begin("cudaGetDeviceProperties");
  if (!is_device(device_idx))
    return fail(cudaErrorInvalidDevice, "cudaGetDeviceProperties", "no such device");
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "stand-in");
  properties->major = 9;
  properties->multiProcessorCount = 8;
  properties->totalGlobalMem = size_t{1} << 30;
  properties->uuid.bytes[0] =
      static_cast<char>(1 + state().visible[static_cast<size_t>(device_idx)]);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device_idx) {
  begin("cudaDeviceGetPCIBusId");
  std::snprintf(text,
                static_cast<size_t>(length),
                "0000:%02X:00.0",
                state().visible[static_cast<size_t>(device_idx)]);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device_idx) {
  begin("cudaDeviceGetAttribute");
  return cuDeviceGetAttribute(value, static_cast<CUdevice_attribute>(attribute), device_idx) ==
                 CUDA_SUCCESS
             ? cudaSuccess
             : answer(cudaErrorInvalidValue);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int device_idx, int peer_device_idx) {
  begin("cudaDeviceCanAccessPeer");
  *can = is_device(device_idx) && is_device(peer_device_idx) && device_idx != peer_device_idx;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer_device_idx, unsigned) {
  begin("cudaDeviceEnablePeerAccess");
  use_context();
  const std::lock_guard lock(state().mutex);
  if (!state().peers.insert({this_thread.device_idx, peer_device_idx}).second)
    return answer(cudaErrorPeerAccessAlreadyEnabled);
  return cudaSuccess;
}

// --- Streams, events, graphs --------------------------------------------------------------------

cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  begin("cudaDeviceGetStreamPriorityRange");
  *lowest = 0;
  *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* made, unsigned flags, int) {
  begin("cudaStreamCreateWithPriority");
  Context& context = use_context();
  auto stream =
      std::make_shared<CUstream_st>(this_thread.device_idx, flags != cudaStreamNonBlocking);
  const std::lock_guard lock(state().mutex);
  *made = stream.get();
  context.streams.push_back(std::move(stream));
  return cudaSuccess;
}

/// RT, Stream Management, cudaStreamDestroy: returns at once; what the stream holds still runs.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  begin("cudaStreamDestroy");
  const auto stream = find_stream(handle);
  if (stream == nullptr)
    return fail(cudaErrorInvalidResourceHandle, "cudaStreamDestroy", "the stream is none");
  const std::lock_guard lock(state().mutex);
  Context& context = state().contexts[static_cast<size_t>(stream->device_idx)];
  std::erase(context.streams, stream);
  context.ended.push_back(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  begin("cudaStreamIsCapturing");
  const auto stream = find_stream(handle);
  if (stream == nullptr)
    return fail(cudaErrorInvalidResourceHandle, "cudaStreamIsCapturing", "the stream is none");
  if (has_implicit_capture(*stream))
    return answer(cudaErrorStreamCaptureImplicit);
  *status =
      stream->worker->is_capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

/// PG, CUDA Graphs, Prohibited and Unhandled Operations: a captured stream has no state to ask
/// about, nor is anything there to wait for.
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  begin("cudaStreamQuery");
  const auto stream = find_stream(handle);
  if (stream == nullptr)
    return fail(cudaErrorInvalidResourceHandle, "cudaStreamQuery", "the stream is none");
  if (is_prohibited() || stream->worker->is_capturing())
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery", "in a capture");
  try {
    return stream->worker->is_idle() ? cudaSuccess : answer(cudaErrorNotReady);
  } catch (const std::exception& error) {
    return fail(cudaErrorLaunchFailure, "cudaStreamQuery", error.what());
  }
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  begin("cudaStreamSynchronize");
  const auto stream = find_stream(handle);
  if (stream == nullptr)
    return fail(cudaErrorInvalidResourceHandle, "cudaStreamSynchronize", "the stream is none");
  if (is_prohibited() || stream->worker->is_capturing())
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize", "in a capture");
  try {
    stream->worker->progress()->await(stream->worker->progress()->num_added());
  } catch (const std::exception& error) {
    return fail(cudaErrorLaunchFailure, "cudaStreamSynchronize", error.what());
  }
  return cudaSuccess;
}

/// PG, CUDA Graphs, Cross-stream Dependencies and Events: a captured stream waits for events of its
/// own capture only; a stream that waits for a captured event joins the capture. RT, Data types,
/// cudaEventWaitExternal: in a capture it makes a node that waits for the event of outside, in each
/// run for the record before that.
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  begin("cudaStreamWaitEvent");
  const auto stream = stream_for_work(handle, "cudaStreamWaitEvent");
  if (stream == nullptr)
    return this_thread.last_error;
  std::shared_ptr<moe::runtime::Event> captured;
  std::shared_ptr<moe::simt::StreamBaton> records;
  {
    const std::lock_guard lock(event->mutex);
    captured = event->captured;
    records = event->records;
  }
  const bool is_external = flags == cudaEventWaitExternal;
  if (is_external && (captured != nullptr || !stream->worker->is_capturing()))
    return fail(cudaErrorInvalidValue, "cudaStreamWaitEvent", "no event of outside a capture");
  const auto last = records->last();
  try {
    if (captured != nullptr)
      stream->worker->wait(*captured);
    else if (is_external)
      stream->worker->take(*records);
    else if (last != nullptr)
      stream->worker->wait(*last);
  } catch (const std::exception& error) {
    return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent", error.what());
  }
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  begin("cudaStreamBeginCapture");
  const auto stream = find_stream(handle);
  if (stream == nullptr || is_legacy(*stream))
    return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture", "the default stream");
  stream->worker->begin_capture();
  const std::lock_guard lock(state().mutex);
  state().captures.push_back({stream->worker.get(), mode, std::this_thread::get_id()});
  return cudaSuccess;
}

/// The same: it ends where it began, and all that took part has been joined by then.
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  begin("cudaStreamEndCapture");
  const auto stream = find_stream(handle);
  {
    const std::lock_guard lock(state().mutex);
    std::erase_if(state().captures, [&](const OpenCapture& capture) {
      return stream != nullptr && capture.origin == stream->worker.get();
    });
  }
  try {
    *graph = new CUgraph_st{stream->worker->end_capture()};
  } catch (const std::exception& error) {
    return fail(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture", error.what());
  }
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  begin("cudaThreadExchangeStreamCaptureMode");
  std::swap(*mode, this_thread.mode);
  return cudaSuccess;
}

/// RT, Graph Management, cudaGraphInstantiate: device resources are taken; it may wait for them.
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  begin("cudaGraphInstantiate");
  if (state().machine.graphs_wait)
    drain(use_context(), "cudaGraphInstantiate");
  *made = new CUgraphExec_st{graph->graph};
  return cudaSuccess;
}

/// RT, Graph Management, cudaGraphUpload: what the first launch would do else.
static void upload(CUgraphExec_st& graph, const CUstream_st& stream, const char* call) {
  if (!graph.is_uploaded.exchange(true) && state().machine.graphs_wait)
    drain(state().contexts[static_cast<size_t>(stream.device_idx)], call);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t handle) {
  begin("cudaGraphUpload");
  const auto stream = stream_for_work(handle, "cudaGraphUpload");
  if (stream == nullptr)
    return this_thread.last_error;
  upload(*graph, *stream, "cudaGraphUpload");
  return cudaSuccess;
}

/// RT, Graph Management, cudaGraphAddEventWaitNode: it says nothing of an event that has ended,
/// which is hence wrong.
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  begin("cudaGraphLaunch");
  const auto stream = stream_for_work(handle, "cudaGraphLaunch");
  if (stream == nullptr)
    return this_thread.last_error;
  const auto batons = graph->graph->batons();
  const auto has_ended = [](const auto& baton) {
    const std::lock_guard lock(state().mutex);
    return state().ended_events.contains(baton.get());
  };
  if (std::any_of(batons.begin(), batons.end(), has_ended))
    return fail(cudaErrorInvalidResourceHandle, "cudaGraphLaunch", "an event of it has ended");
  upload(*graph, *stream, "the first launch of a graph");
  graph->graph->replay(*stream->worker);
  const std::lock_guard lock(stream->names_mutex);
  stream->names[stream->worker->progress()->num_added()] = "a graph";
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  begin("cudaEventCreateWithFlags");
  use_context();
  *made = new CUevent_st;
  (*made)->device_idx = this_thread.device_idx;
  return cudaSuccess;
}

/// RT, Event Management, cudaEventDestroy: legal before the event completes.
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  begin("cudaEventDestroy");
  {
    const std::lock_guard lock(state().mutex);
    if (event->records.use_count() > 1)
      state().ended_events.insert(event->records.get());
  }
  delete event;
  return cudaSuccess;
}

/// PG, Stream and Event Behavior: fails where event and stream belong to different devices.
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  begin("cudaEventRecord");
  const auto stream = stream_for_work(handle, "cudaEventRecord");
  if (stream == nullptr)
    return this_thread.last_error;
  if (stream->device_idx != event->device_idx)
    return fail(
        cudaErrorInvalidResourceHandle, "cudaEventRecord", "the stream is of another device");
  const std::lock_guard lock(event->mutex);
  event->captured = stream->worker->is_capturing() ? stream->worker->record() : nullptr;
  if (event->captured == nullptr)
    stream->worker->give(*event->records);
  return cudaSuccess;
}

/// RT, Data types, cudaEventRecordExternal: in a capture it makes a node that records the event in
/// each run; it is invalid elsewhere.
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  if (flags == cudaEventRecordDefault)
    return cudaEventRecord(event, handle);
  begin("cudaEventRecordWithFlags");
  const auto stream = stream_for_work(handle, "cudaEventRecordWithFlags");
  if (stream == nullptr)
    return this_thread.last_error;
  if (stream->device_idx != event->device_idx || !stream->worker->is_capturing())
    return fail(cudaErrorInvalidValue,
                "cudaEventRecordWithFlags",
                "no stream of the event's device that is captured");
  const std::lock_guard lock(event->mutex);
  stream->worker->give(*event->records);
  return cudaSuccess;
}

/// RT, cudaThreadExchangeStreamCaptureMode: an event that was recorded into a capture has no state,
/// whatever the mode of the thread.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  begin("cudaEventQuery");
  std::shared_ptr<moe::runtime::Event> point;
  {
    const std::lock_guard lock(event->mutex);
    if (event->captured != nullptr)
      return fail(cudaErrorCapturedEvent, "cudaEventQuery", "the event belongs to a capture");
    point = event->records->last();
  }
  if (is_prohibited())
    return fail(cudaErrorStreamCaptureUnsupported, "cudaEventQuery", "while a stream is captured");
  try {
    return point == nullptr || point->is_complete() ? cudaSuccess : answer(cudaErrorNotReady);
  } catch (const std::exception& error) {
    return fail(cudaErrorLaunchFailure, "cudaEventQuery", error.what());
  }
}

// --- Kernels ------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* symbol) {
  begin("cudaFuncGetAttributes");
  if (symbol != reinterpret_cast<const void*>(&own_kernel))
    return fail(cudaErrorInvalidDeviceFunction, "cudaFuncGetAttributes", "the kernel is none");
  *attributes = {};
  attributes->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  begin("cudaGetFuncBySymbol");
  if (is_refused("cudaGetFuncBySymbol"))
    return answer(cudaErrorNotSupported);
  if (symbol != reinterpret_cast<const void*>(&own_kernel))
    return fail(cudaErrorInvalidDeviceFunction, "cudaGetFuncBySymbol", "the kernel is none");
  *function = reinterpret_cast<cudaFunction_t>(&own_functions[0]);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* symbol, void**) {
  begin("cudaLaunchKernelExC");
  const auto stream = stream_for_work(config->stream, "cudaLaunchKernelExC");
  const auto entry = state().foreign.find(symbol);
  if (stream == nullptr || entry == state().foreign.end())
    return fail(cudaErrorInvalidDeviceFunction, "cudaLaunchKernelExC", "the kernel is none");
  load(*stream, symbol, entry->second.name);
  moe::device::Launch shape;
  put_kernel(*stream, {entry->second.name, shape, entry->second.body});
  return cudaSuccess;
}

// --- The driver ---------------------------------------------------------------------------------

CUresult cuGetErrorName(CUresult, const char** name) {
  *name = "an error of the stand-in";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device_idx) {
  begin("cuDeviceGetAttribute");
  if (!is_device(device_idx))
    return refuse(CUDA_ERROR_INVALID_DEVICE, "cuDeviceGetAttribute", "no such device");
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
      *value = moe::simt::kMaxSharedBytes;
      break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = state().machine.has_virtual_memory ? 1 : 0;
      break;
    default:
      *value = 0;
  }
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device_idx, unsigned* flags, int* is_active) {
  begin("cuDevicePrimaryCtxGetState");
  *flags = 0;
  const std::lock_guard lock(state().mutex);
  *is_active = state().contexts[static_cast<size_t>(device_idx)].is_active ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* mode) {
  begin("cuModuleGetLoadingMode");
  *mode = state().machine.is_eager ? CU_MODULE_EAGER_LOADING : CU_MODULE_LAZY_LOADING;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetModule(CUmodule* module, CUfunction function) {
  begin("cuFuncGetModule");
  if (is_refused("cuFuncGetModule"))
    return CUDA_ERROR_NOT_SUPPORTED;
  if (reinterpret_cast<char*>(function) != &own_functions[0])
    return refuse(CUDA_ERROR_INVALID_HANDLE, "cuFuncGetModule", "the kernel is none");
  *module = reinterpret_cast<CUmodule>(const_cast<char*>(kOwnModule));
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunctionCount(unsigned* count, CUmodule) {
  begin("cuModuleGetFunctionCount");
  if (is_refused("cuModuleGetFunctionCount"))
    return CUDA_ERROR_NOT_SUPPORTED;
  *count = kNumOwnFunctions;
  return CUDA_SUCCESS;
}

CUresult cuModuleEnumerateFunctions(CUfunction* functions, unsigned count, CUmodule) {
  begin("cuModuleEnumerateFunctions");
  if (is_refused("cuModuleEnumerateFunctions"))
    return CUDA_ERROR_NOT_SUPPORTED;
  for (unsigned i = 0; i < std::min<unsigned>(count, kNumOwnFunctions); ++i)
    functions[i] = reinterpret_cast<CUfunction>(&own_functions[i]);
  return CUDA_SUCCESS;
}

/// PG, Lazy Loading: loads what a first launch would, which may wait.
CUresult cuFuncLoad(CUfunction function) {
  begin("cuFuncLoad");
  if (is_refused("cuFuncLoad"))
    return CUDA_ERROR_NOT_SUPPORTED;
  if (!this_thread.has_context)
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "cuFuncLoad", "no context is current");
  Context& context = use_context();
  drain(context, "cuFuncLoad");
  const std::lock_guard lock(state().mutex);
  context.loaded.insert(function);
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  begin("cuFuncGetAttribute");
  if (attribute != CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    return refuse(CUDA_ERROR_INVALID_VALUE, "cuFuncGetAttribute", "the attribute is none");
  *value = kStaticSharedBytes;
  return CUDA_SUCCESS;
}

/// DR, Execution Control, cuFuncSetAttribute: static and dynamic shared memory of a kernel are at
/// most what a block may ask for. A function is loaded by it, as by a first launch.
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  begin("cuFuncSetAttribute");
  if (!this_thread.has_context)
    return refuse(CUDA_ERROR_INVALID_CONTEXT, "cuFuncSetAttribute", "no context is current");
  int most_bytes = 0;
  cuDeviceGetAttribute(
      &most_bytes, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, this_thread.device_idx);
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
      value + kStaticSharedBytes > most_bytes)
    return refuse(CUDA_ERROR_INVALID_VALUE, "cuFuncSetAttribute", moe::concat(value, " bytes"));
  Context& context = use_context();
  drain(context, "cuFuncSetAttribute");
  const std::lock_guard lock(state().mutex);
  context.shared_bytes[function] = value;
  return CUDA_SUCCESS;
}

/// DR, Driver Entry Point Access, cuGetProcAddress: a version above the driver's is an invalid
/// value. A version below the function's finds nothing.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name,
                                             void** found,
                                             unsigned version,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  begin("cudaGetDriverEntryPointByVersion");
  struct Function {
    unsigned version;
    void* address;
  };
  // cudaTypedefs.h: the version in which each came.
  static const std::map<std::string, Function> functions = {
      {"cuGetErrorName", {6000, reinterpret_cast<void*>(&cuGetErrorName)}},
      {"cuDeviceGetAttribute", {2000, reinterpret_cast<void*>(&cuDeviceGetAttribute)}},
      {"cuDevicePrimaryCtxGetState", {7000, reinterpret_cast<void*>(&cuDevicePrimaryCtxGetState)}},
      {"cuModuleGetLoadingMode", {11070, reinterpret_cast<void*>(&cuModuleGetLoadingMode)}},
      {"cuFuncGetModule", {11000, reinterpret_cast<void*>(&cuFuncGetModule)}},
      {"cuFuncLoad", {12040, reinterpret_cast<void*>(&cuFuncLoad)}},
      {"cuFuncGetAttribute", {2020, reinterpret_cast<void*>(&cuFuncGetAttribute)}},
      {"cuFuncSetAttribute", {9000, reinterpret_cast<void*>(&cuFuncSetAttribute)}},
      {"cuModuleGetFunctionCount", {12040, reinterpret_cast<void*>(&cuModuleGetFunctionCount)}},
      {"cuModuleEnumerateFunctions", {12040, reinterpret_cast<void*>(&cuModuleEnumerateFunctions)}},
      {"cuMemGetAllocationGranularity",
       {10020, reinterpret_cast<void*>(&cuMemGetAllocationGranularity)}},
      {"cuMemCreate", {10020, reinterpret_cast<void*>(&cuMemCreate)}},
      {"cuMemRelease", {10020, reinterpret_cast<void*>(&cuMemRelease)}},
      {"cuMemAddressReserve", {10020, reinterpret_cast<void*>(&cuMemAddressReserve)}},
      {"cuMemAddressFree", {10020, reinterpret_cast<void*>(&cuMemAddressFree)}},
      {"cuMemMap", {10020, reinterpret_cast<void*>(&cuMemMap)}},
      {"cuMemUnmap", {10020, reinterpret_cast<void*>(&cuMemUnmap)}},
      {"cuMemSetAccess", {10020, reinterpret_cast<void*>(&cuMemSetAccess)}},
      {"cuMemExportToShareableHandle",
       {10020, reinterpret_cast<void*>(&cuMemExportToShareableHandle)}},
      {"cuMemImportFromShareableHandle",
       {10020, reinterpret_cast<void*>(&cuMemImportFromShareableHandle)}},
  };
  *found = nullptr;
  if (version > static_cast<unsigned>(state().machine.driver_version))
    return fail(
        cudaErrorInvalidValue,
        "cudaGetDriverEntryPointByVersion",
        moe::concat(
            name, " of version ", version, " in a driver of ", state().machine.driver_version));
  const auto entry = functions.find(name);
  if (entry == functions.end() || is_refused(moe::concat("finding ", name).c_str())) {
    *result = cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
  }
  if (version < entry->second.version) {
    *result = cudaDriverEntryPointVersionNotSufficent;
    return cudaSuccess;
  }
  *found = entry->second.address;
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
