# The emulator: kernels compiled as C++ over CPU fibers, as a module of the package (_simt) and, with
# every access checked and faults that can be switched on, as a program that explores schedules.
set_source_files_properties(${MOE_COMM_KERNEL_SOURCES} PROPERTIES LANGUAGE CXX)

# Where Boost.Context is installed it switches fibers; simt/fiber.h says what does elsewhere.
set(Boost_USE_STATIC_LIBS ON)
find_package(Boost QUIET CONFIG COMPONENTS context)

function(moe_comm_use_simt target)
  target_compile_definitions(${target} PRIVATE MOE_DEVICE_PRIMITIVES="simt/primitives.h")
  # A .cu file is C++ here; g++ knows the suffix no more than a linker script's. Hints to unroll are
  # for GPUs.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-xc++>" -Wno-unknown-pragmas)
  target_link_libraries(${target} PRIVATE Threads::Threads)
  if(TARGET Boost::context)
    target_compile_definitions(${target} PRIVATE MOE_SIMT_BOOST_CONTEXT)
    target_link_libraries(${target} PRIVATE Boost::context)
  endif()
endfunction()

# The emulator and the kernels, for _simt and for programs that test them.
add_library(moe_comm_simt OBJECT ${MOE_COMM_SIMT_SOURCES})
add_library(moe_comm_kernels OBJECT ${MOE_COMM_KERNEL_SOURCES})
foreach(target moe_comm_simt moe_comm_kernels)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  moe_comm_configure(${target})
  moe_comm_use_simt(${target})
endforeach()

moe_comm_add_module(_simt ${MOE_COMM_SIMT_BINDINGS}
  $<TARGET_OBJECTS:moe_comm_device> $<TARGET_OBJECTS:moe_comm_kernels>
  $<TARGET_OBJECTS:moe_comm_simt> $<TARGET_OBJECTS:moe_comm_common>)
moe_comm_use_simt(_simt)

# Programs of tests/cpp that run on the emulator; built by the tests that run them.
function(moe_comm_add_emulated_program name)
  add_executable(${name} EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/cpp/${name}.cpp"
    $<TARGET_OBJECTS:moe_comm_simt> $<TARGET_OBJECTS:moe_comm_common> ${ARGN})
  moe_comm_configure(${name})
  moe_comm_use_simt(${name})
  target_compile_options(${name} PRIVATE -O1)
endfunction()

moe_comm_add_emulated_program(emulator_kernels)
moe_comm_add_emulated_program(emulator_memory)
moe_comm_add_emulated_program(emulator_streams
  "${PROJECT_SOURCE_DIR}/csrc/runtime/stream_marks.cpp")

add_executable(schedules EXCLUDE_FROM_ALL
  ${MOE_COMM_KERNEL_SOURCES} ${MOE_COMM_SIMT_SOURCES} ${MOE_COMM_CHECKER_SOURCES}
  ${MOE_COMM_COMMON_SOURCES})
moe_comm_configure(schedules)
moe_comm_use_simt(schedules)
target_compile_definitions(schedules PRIVATE MOE_SIMT_CHECKED MOE_WITH_MUTANTS)
