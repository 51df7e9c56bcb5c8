# Sets MOE_COMM_SOURCES: everything that goes into _host, baseline files first.
#
# Files for one instruction set (*_avx2.cpp, *_avx512.cpp) are compiled with its flags and linked
# last. An inline function that several files instantiate is kept from the first of them, so the
# copy that survives never holds instructions that a file of the baseline may not execute.
file(GLOB MOE_COMM_SOURCES CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/core/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/layout/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/heap/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/host/*.cpp"
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc/bindings/*.cpp")

set(MOE_COMM_AVX2_FLAGS "-mavx2;-mf16c")
set(MOE_COMM_AVX512_FLAGS "-mavx2;-mf16c;-mavx512f;-mavx512bw;-mavx512vl;-mavx512dq")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC bug 105593: these warn about the compiler's own intrinsics headers.
  list(APPEND MOE_COMM_AVX512_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
foreach(isa AVX2 AVX512)
  string(TOLOWER ${isa} suffix)
  set(isa_sources ${MOE_COMM_SOURCES})
  list(FILTER isa_sources INCLUDE REGEX "_${suffix}\\.cpp$")
  list(FILTER MOE_COMM_SOURCES EXCLUDE REGEX "_${suffix}\\.cpp$")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    set_source_files_properties(${isa_sources} PROPERTIES COMPILE_OPTIONS
      "${MOE_COMM_${isa}_FLAGS}")
    list(APPEND MOE_COMM_SOURCES ${isa_sources})
  endif()
endforeach()
