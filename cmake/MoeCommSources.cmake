# Sets the sources of every target, baseline files first:
#   MOE_COMM_COMMON_SOURCES    core, layout, heap, cpu, group, ops: linked into every module
#   MOE_COMM_ROW_SOURCES       those of cpu whose loops over rows take the time
#   MOE_COMM_BINDING_SOURCES   what bindings of every module share
#   MOE_COMM_HOST_BINDINGS, MOE_COMM_DEVICE_BINDINGS, MOE_COMM_SIMT_BINDINGS
#   MOE_COMM_RUNTIME_SOURCES   operations on a device, driven from the host
#   MOE_COMM_KERNEL_SOURCES    *.cu: kernels, for nvcc or (as C++) for the emulator
#   MOE_COMM_INTERNODE_SOURCES those among them that put rows into memory of other nodes
#   MOE_COMM_SIMT_SOURCES      the emulator
#
# Most of a compilation is headers, and templates that every file needs: files of one unit are
# compiled as one. -DCMAKE_UNITY_BUILD=OFF compiles each alone.
#
# Files for one instruction set (*_avx2.cpp, *_avx512.cpp) are compiled with its flags and linked
# last. An inline function that several files instantiate is kept from the first of them, so the
# copy that survives never holds instructions that a file of the baseline may not execute.
function(moe_comm_glob result)
  set(patterns ${ARGN})
  list(TRANSFORM patterns PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/csrc/")
  file(GLOB files CONFIGURE_DEPENDS ${patterns})
  set(${result} ${files} PARENT_SCOPE)
endfunction()

# moe_comm_unite(unit sources...)
function(moe_comm_unite unit)
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${unit})
endfunction()

moe_comm_glob(MOE_COMM_COMMON_SOURCES core/*.cpp layout/*.cpp heap/*.cpp cpu/*.cpp group/*.cpp
  ops/*.cpp)
moe_comm_glob(MOE_COMM_ROW_SOURCES cpu/row_kernels_*.cpp cpu/crc32c_avx512.cpp)
list(REMOVE_ITEM MOE_COMM_COMMON_SOURCES ${MOE_COMM_ROW_SOURCES})
# Loops over rows too, which the checker's build compiles for itself.
set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/csrc/cpu/strided_copy.cpp" PROPERTIES
  COMPILE_OPTIONS -O3)
moe_comm_glob(MOE_COMM_BINDING_SOURCES bindings/shared/*.cpp)
moe_comm_glob(MOE_COMM_HOST_BINDINGS bindings/*.cpp)
moe_comm_glob(MOE_COMM_DEVICE_BINDINGS bindings/device/*.cpp)
moe_comm_glob(MOE_COMM_SIMT_BINDINGS bindings/simt/*.cpp)
moe_comm_glob(MOE_COMM_RUNTIME_SOURCES runtime/*.cpp)
moe_comm_glob(MOE_COMM_KERNEL_SOURCES kernels/*.cu)
set(MOE_COMM_INTERNODE_SOURCES ${MOE_COMM_KERNEL_SOURCES})
list(FILTER MOE_COMM_INTERNODE_SOURCES INCLUDE REGEX "/internode_[^/]*\\.cu$")
moe_comm_glob(MOE_COMM_SIMT_SOURCES simt/*.cpp)

set(MOE_COMM_AVX2_FLAGS "-mavx2;-mf16c")
set(MOE_COMM_AVX512_FLAGS "-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC bug 105593: these warn about the compiler's own intrinsics headers.
  list(APPEND MOE_COMM_AVX512_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
foreach(isa AVX2 AVX512)
  string(TOLOWER ${isa} suffix)
  set(isa_sources ${MOE_COMM_ROW_SOURCES})
  list(FILTER isa_sources INCLUDE REGEX "_${suffix}\\.cpp$")
  list(FILTER MOE_COMM_ROW_SOURCES EXCLUDE REGEX "_${suffix}\\.cpp$")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set_source_files_properties(${isa_sources} PROPERTIES COMPILE_OPTIONS
      "${MOE_COMM_${isa}_FLAGS}")
    list(APPEND MOE_COMM_ROW_SOURCES ${isa_sources})
  endif()
endforeach()

# By what changes together, in units of about ten files.
moe_comm_glob(files core/*.cpp layout/*.cpp heap/*.cpp)
# A test links another table of formats in the place of this one.
list(FILTER files EXCLUDE REGEX "/layout/wire_format\\.cpp$")
moe_comm_unite(heap ${files})
moe_comm_glob(files cpu/*.cpp group/*.cpp)
list(REMOVE_ITEM files ${MOE_COMM_ROW_SOURCES})
moe_comm_unite(group ${files})
moe_comm_glob(files ops/*.cpp)
moe_comm_unite(exchange ${files})
moe_comm_glob(files ops/copy_*.cpp ops/batched_copy.cpp ops/prepared_copies.cpp ops/internode_*.cpp
  ops/relay.cpp)
moe_comm_unite(copies ${files})
moe_comm_unite(bindings ${MOE_COMM_BINDING_SOURCES})
moe_comm_unite(host_bindings ${MOE_COMM_HOST_BINDINGS})
moe_comm_glob(files bindings/host_module.cpp bindings/bind_group.cpp bindings/bind_heap.cpp
  bindings/bind_kernels.cpp bindings/bind_rail.cpp)
moe_comm_unite(host_bindings_of_parts ${files})
moe_comm_unite(device_bindings ${MOE_COMM_DEVICE_BINDINGS})
moe_comm_unite(runtime ${MOE_COMM_RUNTIME_SOURCES})
moe_comm_unite(kernels ${MOE_COMM_KERNEL_SOURCES})
moe_comm_unite(internode_kernels ${MOE_COMM_INTERNODE_SOURCES})
moe_comm_unite(simt ${MOE_COMM_SIMT_SOURCES})
moe_comm_unite(simt_bindings ${MOE_COMM_SIMT_BINDINGS})
