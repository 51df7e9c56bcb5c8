# The emulator: kernels compiled as C++ over CPU fibers, as a module of the package (_simt).
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
