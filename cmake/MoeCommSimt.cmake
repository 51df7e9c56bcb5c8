# The emulator: kernels compiled as C++ over CPU fibers, as a module of the package (_simt) and, with
# every access checked and faults that can be switched on, as a program that explores schedules.
set_source_files_properties(${MOE_COMM_KERNEL_SOURCES} PROPERTIES LANGUAGE CXX)

function(moe_comm_use_simt target)
  target_compile_definitions(${target} PRIVATE MOE_DEVICE_PRIMITIVES="simt/primitives.h")
  # A .cu file is C++ here; g++ knows the suffix no more than a linker script's. Hints to unroll are
  # for GPUs.
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-xc++>" -Wno-unknown-pragmas)
endfunction()

moe_comm_add_module(_simt
  ${MOE_COMM_BINDING_SOURCES} ${MOE_COMM_DEVICE_BINDINGS} ${MOE_COMM_SIMT_BINDINGS}
  ${MOE_COMM_RUNTIME_SOURCES}
  ${MOE_COMM_KERNEL_SOURCES} ${MOE_COMM_SIMT_SOURCES} $<TARGET_OBJECTS:moe_comm_common>)
moe_comm_use_simt(_simt)

add_executable(schedules EXCLUDE_FROM_ALL
  ${MOE_COMM_KERNEL_SOURCES} ${MOE_COMM_SIMT_SOURCES} ${MOE_COMM_CHECKER_SOURCES}
  ${MOE_COMM_COMMON_SOURCES})
moe_comm_configure(schedules)
moe_comm_use_simt(schedules)
target_compile_definitions(schedules PRIVATE MOE_SIMT_CHECKED MOE_WITH_MUTANTS)
target_link_libraries(schedules PRIVATE Threads::Threads)
