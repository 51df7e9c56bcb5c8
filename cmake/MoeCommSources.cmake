# Sets MOE_COMM_SOURCES: everything that goes into _host, baseline files first.
#
# Files for one instruction set are compiled with its flags and linked last. An inline function
# that several files instantiate is kept from the first of them, so the copy that survives never
# holds instructions that a file of the baseline may not execute.
file(GLOB MOE_COMM_SOURCES CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/core/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/layout/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/heap/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/host/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/bindings/*.cpp")

foreach(isa avx2 avx512)
  set(source "${CMAKE_CURRENT_SOURCE_DIR}/csrc/host/row_kernels_${isa}.cpp")
  if(NOT source IN_LIST MOE_COMM_SOURCES)
    continue()
  endif()
  list(REMOVE_ITEM MOE_COMM_SOURCES "${source}")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    list(APPEND MOE_COMM_SOURCES "${source}")
  endif()
endforeach()

set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/csrc/host/row_kernels_avx2.cpp"
  PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c")
set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/csrc/host/row_kernels_avx512.cpp"
  PROPERTIES COMPILE_OPTIONS "-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq")
