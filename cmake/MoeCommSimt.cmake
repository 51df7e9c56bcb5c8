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
moe_comm_add_objects(moe_comm_simt ${MOE_COMM_SIMT_SOURCES})
moe_comm_add_objects(moe_comm_kernels ${MOE_COMM_KERNEL_SOURCES})
moe_comm_add_bindings(moe_comm_simt_bindings ${MOE_COMM_SIMT_BINDINGS})
foreach(target moe_comm_simt moe_comm_kernels moe_comm_simt_bindings)
  moe_comm_use_simt(${target})
endforeach()

moe_comm_add_module(_simt moe_comm_simt_bindings moe_comm_device_bindings moe_comm_runtime
  moe_comm_kernels moe_comm_simt)
moe_comm_use_simt(_simt)

# Programs of tests/cpp that run on the emulator.
foreach(name emulator_kernels emulator_memory emulator_streams)
  set(objects moe_comm_simt moe_comm_common moe_comm_rows)
  if(name STREQUAL "emulator_streams")
    list(PREPEND objects moe_comm_runtime moe_comm_kernels)
  endif()
  moe_comm_add_program(${name} ${objects})
  moe_comm_use_simt(${name})
endforeach()

# Kernels with faults that can be switched on, for programs that compare the bytes they make.
set(faulty_sources
  core/*.cpp layout/*.cpp host/row_kernels.cpp host/strided_copy.cpp kernels/combine.cu kernels/dispatch.cu
  kernels/strided_copy.cu kernels/weighted_gradient.cu simt/direct_memory.cpp simt/fiber.cpp
  simt/grid.cpp simt/scheduler.cpp)
moe_comm_glob(faulty_sources ${faulty_sources})
moe_comm_add_objects(moe_comm_faulty ${faulty_sources})
foreach(name dispatch_kernel kernel_rows)
  moe_comm_add_program(${name} moe_comm_faulty moe_comm_rows)
endforeach()
target_sources(kernel_rows PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp/kernel_copies.cpp")
foreach(target moe_comm_faulty dispatch_kernel kernel_rows)
  moe_comm_use_simt(${target})
  target_compile_definitions(${target} PRIVATE MOE_WITH_MUTANTS)
endforeach()

# Operations on a device whose callers have streams, with faults in the phase that receives late.
moe_comm_add_objects(moe_comm_faulty_runtime ${MOE_COMM_RUNTIME_SOURCES})
moe_comm_add_program(stream_callers moe_comm_faulty_runtime moe_comm_kernels moe_comm_simt
  moe_comm_common moe_comm_rows)
foreach(target moe_comm_faulty_runtime stream_callers)
  moe_comm_use_simt(${target})
  target_compile_definitions(${target} PRIVATE MOE_WITH_MUTANTS)
endforeach()

# The whole, with such faults, and every access checked. Host and kernels have words of their own for
# the order of an access.
file(GLOB kernel_checker CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/schedules/*.cpp")
set(host_checker ${kernel_checker})
list(FILTER host_checker INCLUDE REGEX "/host_[^/]*$")
moe_comm_unite(kernel_checker ${kernel_checker})
moe_comm_unite(host_checker ${host_checker})
moe_comm_add_objects(moe_comm_checked ${MOE_COMM_COMMON_SOURCES} ${MOE_COMM_KERNEL_SOURCES}
  ${MOE_COMM_SIMT_SOURCES} ${kernel_checker})
moe_comm_use_simt(moe_comm_checked)
target_include_directories(moe_comm_checked PRIVATE "${PROJECT_SOURCE_DIR}/tests")
target_compile_definitions(moe_comm_checked PRIVATE MOE_SIMT_CHECKED MOE_WITH_MUTANTS)

# Programs that run for a second have no use for more.
foreach(target moe_comm_faulty moe_comm_faulty_runtime moe_comm_checked)
  target_compile_options(${target} PRIVATE -O1)
endforeach()

add_executable(schedules EXCLUDE_FROM_ALL
  $<TARGET_OBJECTS:moe_comm_checked> $<TARGET_OBJECTS:moe_comm_rows>)
set_target_properties(schedules PROPERTIES LINKER_LANGUAGE CXX)
moe_comm_configure(schedules)
moe_comm_use_simt(schedules)
add_dependencies(test_programs schedules)
