# The module _nvshmem: what _cuda is, and kernels that put rows into memory of GPUs of other nodes.
# Only those kernels are compiled again, to be linked with NVSHMEM's device code; the others are the
# objects of _cuda. NVSHMEM's host library is found at run time.
#   MOE_COMM_NVSHMEM  auto (where _cuda is built and NVSHMEM is found), on or off
#   NVSHMEM_HOME      where NVSHMEM lies; by default the environment variable of that name, or the
#                     wheel beside this Python
set(MOE_COMM_NVSHMEM "auto" CACHE STRING "Build the module _nvshmem: auto, on or off")
set_property(CACHE MOE_COMM_NVSHMEM PROPERTY STRINGS auto on off)
set(NVSHMEM_HOME "" CACHE PATH "Folder with NVSHMEM's include and lib; empty for the wheel's")
if(NOT MOE_COMM_NVSHMEM MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "MOE_COMM_NVSHMEM must be auto, on or off, got ${MOE_COMM_NVSHMEM}")
endif()

# Sets nvshmem_problem to why the module cannot be built, or to "".
function(moe_comm_find_nvshmem)
  set(nvshmem_problem "" PARENT_SCOPE)
  if(NOT MOE_COMM_HAS_CUDA)
    set(nvshmem_problem "moe_comm._cuda is not built" PARENT_SCOPE)
    return()
  endif()
  if(NOT MOE_COMM_INTERNODE_SOURCES)
    set(nvshmem_problem "there are no kernels for it" PARENT_SCOPE)
    return()
  endif()
  set(home "${NVSHMEM_HOME}")
  if(NOT home)
    set(home "$ENV{NVSHMEM_HOME}")
  endif()
  if(NOT home)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
        "import importlib.util as u; s = u.find_spec('nvidia') and u.find_spec('nvidia.nvshmem'); print(next(iter(s.submodule_search_locations)) if s else '', end='')"
      OUTPUT_VARIABLE home)
  endif()
  if(NOT home)
    set(nvshmem_problem "neither the wheel nvidia-nvshmem-cu${CUDAToolkit_VERSION_MAJOR} nor NVSHMEM_HOME was found" PARENT_SCOPE)
    return()
  endif()
  foreach(file include/nvshmem.h include/nvshmemx.h lib/libnvshmem_device.a)
    if(NOT EXISTS "${home}/${file}")
      set(nvshmem_problem "there is no ${home}/${file}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(nvshmem_home "${home}" PARENT_SCOPE)
endfunction()

if(MOE_COMM_NVSHMEM STREQUAL "off")
  set(nvshmem_problem "MOE_COMM_NVSHMEM=off")
else()
  moe_comm_find_nvshmem()
  if(nvshmem_problem AND MOE_COMM_NVSHMEM STREQUAL "on")
    message(FATAL_ERROR "MOE_COMM_NVSHMEM=on: ${nvshmem_problem}")
  elseif(nvshmem_problem)
    message(STATUS "moe_comm._nvshmem is not built: ${nvshmem_problem}")
  endif()
endif()

if(NOT nvshmem_problem)
  moe_comm_wrap_kernels(nvshmem_sources internode_kernels ${MOE_COMM_INTERNODE_SOURCES})
  # A library, so that its device code is linked with NVSHMEM's once and for itself.
  add_library(moe_comm_nvshmem_kernels STATIC ${nvshmem_sources})
  # Without warnings of spills: functions of NVSHMEM's own have some.
  moe_comm_configure_kernels(moe_comm_nvshmem_kernels "device/nvshmem.cuh")
  target_include_directories(moe_comm_nvshmem_kernels SYSTEM PRIVATE "${nvshmem_home}/include")
  set_target_properties(moe_comm_nvshmem_kernels PROPERTIES
    CUDA_SEPARABLE_COMPILATION ON
    CUDA_RESOLVE_DEVICE_SYMBOLS ON)
  target_link_libraries(moe_comm_nvshmem_kernels PRIVATE "${nvshmem_home}/lib/libnvshmem_device.a")

  moe_comm_glob(MOE_COMM_NVSHMEM_SOURCES nvshmem/*.cpp bindings/nvshmem/*.cpp)
  moe_comm_unite(nvshmem ${MOE_COMM_NVSHMEM_SOURCES})
  moe_comm_add_bindings(moe_comm_nvshmem ${MOE_COMM_NVSHMEM_SOURCES})
  target_compile_definitions(moe_comm_nvshmem PRIVATE MOE_CUDA_ARCHS="${archs_text}")
  target_include_directories(moe_comm_nvshmem SYSTEM PRIVATE
    ${CUDAToolkit_INCLUDE_DIRS} "${nvshmem_home}/include")

  moe_comm_add_module(_nvshmem moe_comm_nvshmem moe_comm_cuda_bindings moe_comm_cuda moe_comm_device_bindings
    moe_comm_runtime moe_comm_cuda_kernels)
  set_target_properties(_nvshmem PROPERTIES CUDA_RESOLVE_DEVICE_SYMBOLS OFF)
  # Whole: files of kernels name themselves when the module is loaded.
  target_link_libraries(_nvshmem PRIVATE
    -Wl,--whole-archive moe_comm_nvshmem_kernels -Wl,--no-whole-archive
    "${nvshmem_home}/lib/libnvshmem_device.a" CUDA::cudart_static)
endif()
