# moe_comm_configure(target [sanitizer]): flags every target of this project is built with.
# `sanitizer` is a value of -fsanitize=, MOE_COMM_SANITIZE unless given.
function(moe_comm_configure target)
  set(sanitizer ${MOE_COMM_SANITIZE})
  if(ARGC GREATER 1)
    set(sanitizer ${ARGV1})
  endif()
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  # -ffp-contract=off: a product is rounded before it is added, on every machine (docs/design.md).
  target_compile_options(${target} PRIVATE -ffp-contract=off -fvisibility=hidden -Wall -Wextra)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    # GCC bug 105651: warns about std::string's own operator+.
    target_compile_options(${target} PRIVATE -Wno-restrict)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_UNITY_BUILD)
    # Takes the files of a unit for headers, whose anonymous namespaces would be a mistake.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    target_compile_options(${target} PRIVATE -march=x86-64-v2)
  endif()
  if(MOE_COMM_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(sanitizer)
    # Reports name lines; to know variables, too, would take half as long again to compile.
    target_compile_options(${target} PRIVATE -g1 -O1 -fno-omit-frame-pointer -fsanitize=${sanitizer})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # Fences order waiters and wakers only (core/sync.h); data goes by release and acquire.
      target_compile_options(${target} PRIVATE -Wno-tsan)
    endif()
    target_link_options(${target} PRIVATE -fsanitize=${sanitizer})
  elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
    # The C++ runtime travels inside: a wheel then runs where the system's is older than the
    # compiler. The unwinder stays the system's: what one module throws passes through another, and
    # frames that two copies share end the process.
    target_link_options(${target} PRIVATE -static-libstdc++)
  endif()
endfunction()
