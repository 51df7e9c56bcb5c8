# The module _cuda: kernels compiled by nvcc, with the CUDA runtime linked statically and the driver
# found at run time, so that it loads on a machine without one.
#   MOE_COMM_CUDA        auto (where nvcc is found), on or off
#   MOE_COMM_CUDA_ARCHS  compute capabilities to compile for: 90a is Hopper, 100 Blackwell
set(MOE_COMM_CUDA "auto" CACHE STRING "Build the module _cuda: auto, on or off")
set_property(CACHE MOE_COMM_CUDA PROPERTY STRINGS auto on off)
set(MOE_COMM_CUDA_ARCHS "80;90a;100" CACHE STRING "Compute capabilities that kernels are compiled for")
string(REPLACE "," ";" MOE_COMM_CUDA_ARCHS "${MOE_COMM_CUDA_ARCHS}")
if(NOT MOE_COMM_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "MOE_COMM_CUDA must be auto, on or off, got ${MOE_COMM_CUDA}")
endif()

set(MOE_COMM_HAS_CUDA FALSE)
if(NOT MOE_COMM_CUDA STREQUAL "off")
  set(CMAKE_CUDA_ARCHITECTURES ${MOE_COMM_CUDA_ARCHS})
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    # CMake before 3.26 does not know this flag of nvcc.
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    find_package(CUDAToolkit REQUIRED)
    set(MOE_COMM_HAS_CUDA TRUE)
  elseif(MOE_COMM_CUDA STREQUAL "on")
    message(FATAL_ERROR "MOE_COMM_CUDA=on needs nvcc: put it into PATH, or its path into CUDACXX")
  else()
    message(STATUS "No nvcc that works: moe_comm._cuda is not built (MOE_COMM_CUDA=auto)")
  endif()
endif()
if(MOE_COMM_HAS_CUDA AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  # Constants in assembly (csrc/device/ptx.cuh) and functions of the driver come with it.
  if(MOE_COMM_CUDA STREQUAL "on")
    message(FATAL_ERROR "nvcc 12.8 or later is needed, found ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8: moe_comm._cuda is not built")
  set(MOE_COMM_HAS_CUDA FALSE)
endif()

# moe_comm_wrap_kernels(result name sources...): a file that nvcc compiles in place of the sources. The
# same files are C++ for the emulator, and a source has one language in a folder: so another includes
# them. It is one file, because nvcc spends more on what every kernel includes than on most kernels.
function(moe_comm_wrap_kernels result name)
  set(content "")
  foreach(source ${ARGN})
    get_filename_component(file "${source}" NAME)
    string(APPEND content "#include \"kernels/${file}\"\n")
  endforeach()
  set(wrapper "${CMAKE_CURRENT_BINARY_DIR}/${name}.cu")
  file(CONFIGURE OUTPUT "${wrapper}" CONTENT "${content}")
  set(${result} "${wrapper}" PARENT_SCOPE)
endfunction()

# moe_comm_configure_kernels(target primitives flags...): flags of kernels over the vocabulary in
# that file.
function(moe_comm_configure_kernels target primitives)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  target_compile_definitions(${target} PRIVATE MOE_DEVICE_PRIMITIVES="${primitives}")
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(${target} PRIVATE
    # std::bit_cast and constexpr members in kernels. Neither -ftz=true nor --use_fast_math, ever:
    # subnormals are kept (docs/design.md).
    -std=c++20 --expt-relaxed-constexpr
    --threads=0
    -Xcompiler=-Wall,-Wextra,-ffp-contract=off
    ${ARGN})
  if(MOE_COMM_WERROR)
    target_compile_options(${target} PRIVATE --Werror=all-warnings)
  endif()
endfunction()

if(MOE_COMM_HAS_CUDA)
  set(cuda_kernels ${MOE_COMM_KERNEL_SOURCES})
  list(FILTER cuda_kernels EXCLUDE REGEX "/internode_[^/]*\\.cu$")
  moe_comm_wrap_kernels(cuda_sources kernels ${cuda_kernels})
  add_library(moe_comm_cuda_kernels OBJECT ${cuda_sources})
  moe_comm_configure_kernels(moe_comm_cuda_kernels "device/ptx.cuh" -Xptxas=--warn-on-spills)

  # What _cuda and _nvshmem share, and what of it stands on CUDA alone.
  moe_comm_glob(MOE_COMM_CUDA_SOURCES cuda/*.cpp)
  moe_comm_glob(MOE_COMM_CUDA_BINDINGS bindings/cuda/bind_*.cpp)
  moe_comm_unite(cuda ${MOE_COMM_CUDA_SOURCES})
  moe_comm_unite(cuda_bindings ${MOE_COMM_CUDA_BINDINGS})
  moe_comm_add_objects(moe_comm_cuda ${MOE_COMM_CUDA_SOURCES})
  moe_comm_add_bindings(moe_comm_cuda_bindings ${MOE_COMM_CUDA_BINDINGS})
  moe_comm_add_bindings(moe_comm_cuda_module "${PROJECT_SOURCE_DIR}/csrc/bindings/cuda/cuda_module.cpp")
  string(REPLACE ";" ", " archs_text "${MOE_COMM_CUDA_ARCHS}")
  foreach(target moe_comm_cuda moe_comm_cuda_bindings moe_comm_cuda_module)
    target_compile_definitions(${target} PRIVATE MOE_CUDA_ARCHS="${archs_text}")
    target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  endforeach()

  moe_comm_add_module(_cuda moe_comm_cuda_module moe_comm_cuda_bindings moe_comm_cuda moe_comm_device_bindings
    moe_comm_runtime moe_comm_cuda_kernels)
  set_target_properties(_cuda PROPERTIES CUDA_RESOLVE_DEVICE_SYMBOLS OFF)
  target_link_libraries(_cuda PRIVATE CUDA::cudart_static)
endif()
